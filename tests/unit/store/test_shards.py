import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from eyas.engines.fake.engine import FakeEngine
from eyas.errors import ContractError, UserError
from eyas.safetensors_io import checksum_of_file
from eyas.store import shards
from eyas.store.journal import read_journal
from eyas.store.manifest import StoreManifest, plan_shards
from eyas.store.shards import ShardStore, ShardWriter
from eyas.types import Failure, HiddenStates, TargetSpec
from tiny import make_spec, random_samples

SPEC = make_spec()


def states_of(num: int, spec: TargetSpec = SPEC) -> list[HiddenStates]:
    samples = random_samples(num, spec.vocab_size)
    return [item for item in FakeEngine(None, spec).capture(samples) if isinstance(item, HiddenStates)]


def manifest_for(states: list[HiddenStates], spec: TargetSpec = SPEC) -> StoreManifest:
    bounds = plan_shards([len(s.sample) for s in states], spec.bytes_per_token, 60 * spec.bytes_per_token)
    return StoreManifest(spec, "data", bounds)


def write_store(folder: Path, states: list[HiddenStates], spec: TargetSpec = SPEC) -> ShardWriter:
    manifest = manifest_for(states, spec)
    writer = ShardWriter(folder, manifest)
    for shard in writer.missing():
        writer.write(shard, states[manifest.shard_bounds[shard] : manifest.shard_bounds[shard + 1]])
    return writer


def read_all(store: ShardStore) -> list[HiddenStates]:
    return [store.read(index) for index in range(len(store.lengths))]


def shard_file(folder: Path, shard: int = 1) -> Path:
    return folder / f"shard-{shard:05d}.safetensors"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_states_come_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    spec = make_spec(dtype=dtype)
    states = states_of(12, spec)
    writer = write_store(tmp_path, states, spec)
    assert writer.manifest.num_shards > 2
    store = ShardStore(tmp_path)
    assert store.spec == spec
    assert list(store.lengths) == [len(s.sample) for s in states]
    for index in (11, 0, *range(12)):
        found, wanted = store.read(index), states[index]
        assert found.sample.sample_id == wanted.sample.sample_id
        assert found.sample.cut == wanted.sample.cut
        assert (found.sample.input_ids == wanted.sample.input_ids).all()
        assert (found.sample.loss_mask == wanted.sample.loss_mask).all()
        assert torch.equal(found.aux, wanted.aux)
        assert torch.equal(found.last, wanted.last)
        assert found.aux.dtype == getattr(torch, dtype)


def test_shards_are_bounded_in_bytes_unless_one_sample_is_larger() -> None:
    assert plan_shards([10, 10, 10, 50, *[10] * 9], bytes_per_token=2, shard_bytes=40)[:5] == (0, 2, 3, 4, 6)
    assert plan_shards([10], 2, 1) == (0, 1)
    assert plan_shards([], 2, 40) == (0,)


def test_the_last_of_several_shards_get_smaller_and_a_single_one_stays_whole() -> None:
    bounds = plan_shards([1] * 100, bytes_per_token=1, shard_bytes=32)
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    assert sizes == [25, 18, 14, 10, 8, 6, 4, 3, 3, 2, 2, 2, 2, 1]
    assert plan_shards([1] * 32, bytes_per_token=1, shard_bytes=32) == (0, 32)
    sizes = [b - a for a, b in itertools.pairwise(plan_shards([1] * 1000, 1, 32))]
    assert sizes[:27] == [32] * 27
    assert sum(sizes) == 1000


def test_a_store_without_samples_is_one_empty_shard(tmp_path: Path) -> None:
    write_store(tmp_path, [])
    assert list(ShardStore(tmp_path).lengths) == []


def test_a_shard_has_the_same_bytes_when_written_again(tmp_path: Path) -> None:
    states = states_of(8)
    write_store(tmp_path / "a", states)
    write_store(tmp_path / "b", states)
    assert shard_file(tmp_path / "a").read_bytes() == shard_file(tmp_path / "b").read_bytes()
    assert ShardStore(tmp_path / "a").fingerprint == ShardStore(tmp_path / "b").fingerprint


def test_only_missing_shards_are_written_again(tmp_path: Path) -> None:
    states = states_of(12)
    manifest = manifest_for(states)
    writer = ShardWriter(tmp_path, manifest)
    writer.write(1, states[manifest.shard_bounds[1] : manifest.shard_bounds[2]])
    again = ShardWriter(tmp_path, manifest)
    assert again.missing() == [s for s in range(manifest.num_shards) if s != 1]
    with pytest.raises(ContractError, match="is incomplete: "):
        ShardStore(tmp_path)


def test_a_deleted_shard_is_missing_and_its_rewriting_heals_the_store(tmp_path: Path) -> None:
    states = states_of(12)
    write_store(tmp_path, states)
    shard_file(tmp_path).unlink()
    with pytest.raises(ContractError, match="is damaged: no file bytes"):
        _ = ShardStore(tmp_path).lengths
    assert ShardWriter(tmp_path, manifest_for(states)).missing() == [1]
    write_store(tmp_path, states)
    assert len(ShardStore(tmp_path).lengths) == 12


def test_a_truncated_shard_is_refused_and_counts_as_missing(tmp_path: Path) -> None:
    states = states_of(12)
    write_store(tmp_path, states)
    data = shard_file(tmp_path).read_bytes()
    shard_file(tmp_path).write_bytes(data[:-5])
    with pytest.raises(ContractError) as caught:
        _ = ShardStore(tmp_path).lengths
    assert f"{len(data) - 5} bytes, {len(data)} were written" in caught.value.what
    assert "delete shard-00001.safetensors" in str(caught.value.hint)
    assert ShardWriter(tmp_path, manifest_for(states)).missing() == [1]


@pytest.mark.parametrize("place", [4, 0.5, -1])
def test_one_flipped_bit_anywhere_is_found(tmp_path: Path, place: float) -> None:
    write_store(tmp_path, states_of(12))
    data = bytearray(shard_file(tmp_path).read_bytes())
    data[int(place * len(data)) if isinstance(place, float) else place] ^= 1
    shard_file(tmp_path).write_bytes(data)
    with pytest.raises(ContractError, match=r"shard-00001\.safetensors is damaged"):
        read_all(ShardStore(tmp_path))


def test_lengths_and_tokens_need_no_checksum_and_states_are_never_read_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = states_of(12)
    write_store(tmp_path, states)
    verified = []
    monkeypatch.setattr(
        shards, "checksum_of_file", lambda path: verified.append(path) or checksum_of_file(path)
    )
    store = ShardStore(tmp_path)
    assert store.lengths == [len(s.sample) for s in states]
    assert store.sample(3).sample_id == states[3].sample.sample_id
    assert not verified
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store.read, [*range(12)] * 3))
    assert sorted(verified) == sorted(tmp_path.glob("*.safetensors"))


def test_a_shard_of_another_store_in_its_place_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path / "a", states_of(12))
    other = make_spec(weights_fingerprint="other")
    write_store(tmp_path / "b", states_of(12, other), other)
    shard_file(tmp_path / "a").write_bytes(shard_file(tmp_path / "b").read_bytes())
    with pytest.raises(ContractError, match="states of another target"):
        _ = ShardStore(tmp_path / "a").lengths


def test_a_torn_journal_line_is_forgotten_and_its_shard_redone(tmp_path: Path) -> None:
    states = states_of(12)
    write_store(tmp_path, states)
    before = ShardStore(tmp_path).fingerprint
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-20])
    last = manifest_for(states).num_shards - 1
    assert sorted(read_journal(tmp_path)) == list(range(last))
    assert journal.read_bytes() == whole[:-20], "a reader may come while a writer is writing"
    assert ShardWriter(tmp_path, manifest_for(states)).missing() == [last]
    assert journal.read_bytes().endswith(b"\n")
    write_store(tmp_path, states)
    assert journal.read_bytes() == whole
    assert ShardStore(tmp_path).fingerprint == before


def test_a_damaged_journal_line_before_the_last_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path, states_of(12))
    journal = tmp_path / "journal.jsonl"
    first, *rest = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([first.replace('"shard"', '"shrad"'), *rest]))
    with pytest.raises(ContractError, match="line 1 is damaged"):
        ShardStore(tmp_path)


@pytest.mark.parametrize(
    "other",
    [
        make_spec(aux_layer_ids=(1, 4, 5)),
        make_spec(weights_fingerprint="other"),
        make_spec(dtype="bfloat16"),
    ],
    ids=["other layers", "other weights", "other dtype"],
)
def test_a_store_takes_no_states_of_another_target(tmp_path: Path, other: TargetSpec) -> None:
    states = states_of(12)
    write_store(tmp_path, states)
    with pytest.raises(ContractError, match="another target or other data"):
        ShardWriter(tmp_path, StoreManifest(other, "data", manifest_for(states).shard_bounds))


def test_a_store_takes_no_states_of_other_data(tmp_path: Path) -> None:
    states = states_of(12)
    write_store(tmp_path, states)
    with pytest.raises(ContractError, match="another target or other data"):
        ShardWriter(tmp_path, StoreManifest(SPEC, "other data", manifest_for(states).shard_bounds))


def test_failures_are_journalled_with_their_reasons(tmp_path: Path) -> None:
    states = states_of(2)
    writer = ShardWriter(tmp_path, StoreManifest(SPEC, "data", (0, 3)))
    writer.write(0, states, [Failure("sample-2", "out of memory")])
    assert read_journal(tmp_path)[0].failures == (("sample-2", "out of memory"),)
    assert len(ShardStore(tmp_path).lengths) == 2


def test_a_folder_without_a_manifest_holds_no_states(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no hidden states"):
        ShardStore(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"format_version": 2}'])
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ContractError, match="is damaged"):
        ShardStore(tmp_path)


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format_version": 99}')
    with pytest.raises(ContractError, match="format version 99"):
        ShardStore(tmp_path)


def test_a_store_opens_with_any_safetensors_reader(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    states = states_of(4)
    write_store(tmp_path, states)
    tensors = load_file(shard_file(tmp_path, 0))
    assert set(tensors) == {"aux", "last", "input_ids", "loss_mask", "cut", "offsets"}
    first = states[0]
    assert torch.equal(tensors["aux"][: tensors["offsets"][1]], first.aux)
