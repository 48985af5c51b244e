"""Stores behind URLs hold the same bytes, fp8 loses no layer, and no fleet's journal is lost."""

from pathlib import Path

import pytest
import torch
from test_shards import SPEC, manifest_for, states_of, write_store

from eyas.errors import ContractError, UserError
from eyas.store import fp8
from eyas.store.journal import read_journal
from eyas.store.manifest import StoreManifest, plan_shards, stored_bytes_per_token
from eyas.store.shards import ShardStore, ShardWriter, missing_shards
from eyas.store.storage import folder_of


@pytest.fixture(scope="module")
def s3() -> str:  # type: ignore[misc]
    """An S3-compatible server on this machine's loopback."""
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    import s3fs

    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    _, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}"),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            patch.setenv(name, value)
        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket"
    running.stop()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_a_store_behind_a_url_holds_the_same_shards(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    root = "memory://" + tmp_path.name if kind == "memory" else request.getfixturevalue("s3") + "/run"
    states = states_of(12)
    write_store(tmp_path, states)
    write_store(root, states)  # type: ignore[arg-type]
    local, remote = ShardStore(tmp_path), ShardStore(root)
    assert remote.fingerprint == local.fingerprint
    for index in (11, 0, 5):
        assert torch.equal(remote.read(index).aux, states[index].aux)
    folder = folder_of(root)
    name = "shard-00001.safetensors"
    assert folder.read(name) == (tmp_path / name).read_bytes()
    folder.remove(name)
    assert missing_shards(root) == [1]
    write_store(root, states)  # type: ignore[arg-type]
    data = folder.read(name)
    folder.write(name, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ContractError, match=f"{root}/{name} is damaged"):
        ShardStore(root).verify(1)


def test_an_unknown_kind_of_url_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="cannot use nothing://a"):
        folder_of("nothing://a")


def test_fp8_keeps_small_layers_beside_massive_ones() -> None:
    states = torch.randn(50, 3, 64) * torch.tensor([0.01, 1.0, 800.0])[:, None]
    states[:, 2, 3] *= 30
    values, scale = fp8.encode(states)
    assert values.dtype == torch.float8_e4m3fn
    assert scale.shape == (50, 3)
    back = fp8.decode(values, scale, torch.float32)
    error = (back - states).norm(dim=-1) / states.norm(dim=-1)
    assert float(error.max()) < 0.04
    assert torch.equal(fp8.decode(*fp8.encode(torch.zeros(2, 8)), torch.float32), torch.zeros(2, 8))


def test_an_fp8_store_is_smaller_and_reads_back_in_the_targets_type(tmp_path: Path) -> None:
    states = states_of(12)
    per_token = stored_bytes_per_token(SPEC, "float8_e4m3fn")
    assert per_token == 4 * (16 + 4)
    bounds = plan_shards([len(s.sample) for s in states], per_token, 60 * per_token)
    writer = ShardWriter(tmp_path, StoreManifest(SPEC, "data", bounds, "float8_e4m3fn"))
    for shard in writer.missing():
        writer.write(shard, states[bounds[shard] : bounds[shard + 1]])
    found = ShardStore(tmp_path).read(7)
    assert found.aux.dtype == found.last.dtype == torch.float32
    assert float((found.aux - states[7].aux).norm() / states[7].aux.norm()) < 0.04


def test_several_writers_share_a_store_and_the_last_attempt_counts(tmp_path: Path) -> None:
    states = states_of(12)
    manifest = manifest_for(states)
    bounds = manifest.shard_bounds
    writers = [ShardWriter(tmp_path, manifest, name) for name in ("a", "b")]
    for shard in range(manifest.num_shards):
        writers[shard % 2].write(shard, states[bounds[shard] : bounds[shard + 1]])
    assert {p.name for p in tmp_path.glob("journal*")} == {"journal-a.jsonl", "journal-b.jsonl"}
    assert missing_shards(tmp_path) == []
    wrong = states[bounds[0] : bounds[1]][::-1]
    writers[1].write(0, wrong)
    with pytest.raises(ContractError, match="two writers have written shard 0"):
        read_journal(tmp_path)
    assert missing_shards(tmp_path) == [0]
    ShardWriter(tmp_path, manifest).write(0, states[bounds[0] : bounds[1]])
    assert read_journal(tmp_path)[0].attempt == 2
    assert len(ShardStore(tmp_path).lengths) == 12
