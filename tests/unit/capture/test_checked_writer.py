"""Between engine and store: whole shards behind the engine's back, nothing twice, nothing lost."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.capture import checked_writer as writer_module
from eyas.capture.capture_checks import check_states
from eyas.capture.checked_writer import CheckedShardWriter, capture_into
from eyas.capture.statistics import LayerSums, table_of
from eyas.engines.fake.engine import FakeEngine
from eyas.engines.probe import outside_envelope
from eyas.errors import ContractError, EyasError
from eyas.row_stats import measure_rows
from eyas.store.journal import read_journal
from eyas.store.manifest import StoreManifest
from eyas.store.shards import ShardStore, ShardWriter
from eyas.types import Failure, HiddenStates, TargetSpec
from vllm_cases import make_model, mixed_samples, spec_of_model

SAMPLES = mixed_samples([4, 9, 2, 7, 5, 3])
SHARDS = {0: SAMPLES[:2], 1: SAMPLES[2:5], 2: SAMPLES[5:]}
ANY = torch.tensor([[0.0, float("inf")]] * 2)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TargetSpec:
    return spec_of_model(make_model(tmp_path_factory.mktemp("model")), (1, 3))


def states(spec: TargetSpec, index: int, scale: float = 1.0) -> HiddenStates:
    generator = torch.Generator().manual_seed(index)
    sample = SAMPLES[index]
    full = torch.randn(len(sample), 3, spec.hidden_size, generator=generator) * scale
    return HiddenStates.select(sample, full[:, :2], full[:, 2])


def writer_at(
    folder: Path, spec: TargetSpec, max_failures: int = 0, envelope: torch.Tensor = ANY
) -> CheckedShardWriter:
    shards = ShardWriter(folder, StoreManifest(spec, "data", (0, 2, 5, 6)))
    outside = functools.partial(outside_envelope, envelope=envelope)
    check = functools.partial(check_states, spec=spec, outside=outside)
    writer = CheckedShardWriter(shards, check, max_failures)
    assert list(writer.feed(SHARDS.items())) == SAMPLES
    return writer


def test_states_in_any_order_become_the_shards_they_belong_to(tmp_path: Path, spec: TargetSpec) -> None:
    writer = writer_at(tmp_path, spec)
    for index in (5, 0, 3, 1, 4, 2):
        writer.put(states(spec, index))
    writer.finish()
    writer.close()
    store = ShardStore(tmp_path)
    for index, sample in enumerate(SAMPLES):
        found, put = store.read(index), states(spec, index)
        assert found.sample.sample_id == sample.sample_id
        assert torch.equal(found.aux, put.aux)
        assert torch.equal(found.last, put.last)


def test_the_table_holds_what_all_values_together_give(tmp_path: Path, spec: TargetSpec) -> None:
    writer = writer_at(tmp_path, spec)
    for index in range(len(SAMPLES)):
        writer.put(states(spec, index))
    writer.finish()
    writer.close()
    everything = torch.cat([states(spec, i).aux for i in range(len(SAMPLES))])[:, 1].double()
    table = table_of(r.figures for r in read_journal(tmp_path).values())
    row = table[1]
    assert row["min"] == float(everything.min())
    assert row["max"] == float(everything.max())
    assert row["mean"] == pytest.approx(float(everything.mean()), abs=1e-6)
    assert row["rms"] == pytest.approx(float(everything.square().mean().sqrt()), rel=1e-6)
    assert len(table) == 3


def test_a_sample_twice_or_unasked_is_refused(tmp_path: Path, spec: TargetSpec) -> None:
    writer = writer_at(tmp_path, spec)
    writer.put(states(spec, 2))
    with pytest.raises(ContractError, match="s2 twice or unasked"):
        writer.put(states(spec, 2))
    with pytest.raises(ContractError, match="other twice or unasked"):
        writer.put(Failure("other", "why"))
    writer.close()


def test_a_lost_sample_is_named(tmp_path: Path, spec: TargetSpec) -> None:
    writer = writer_at(tmp_path, spec)
    for index in range(5):
        writer.put(states(spec, index))
    with pytest.raises(ContractError, match="the engine lost 1 samples, such as s5"):
        writer.finish()
    writer.close()
    assert sorted(read_journal(tmp_path)) == [0, 1]


def test_failures_beyond_the_limit_stop_and_those_within_are_recorded(
    tmp_path: Path, spec: TargetSpec
) -> None:
    writer = writer_at(tmp_path, spec, max_failures=1)
    writer.put(Failure("s0", "out of memory"))
    writer.put(states(spec, 1))
    with pytest.raises(EyasError, match="2 samples failed, more than extract"):
        writer.put(Failure("s3", "too long"))
    writer.close()
    assert read_journal(tmp_path)[0].failures == (("s0", "out of memory"),)


def spoil(item: HiddenStates, **changes: Any) -> HiddenStates:
    return dataclasses.replace(item, **changes)


def put_all(writer: CheckedShardWriter, items: list[HiddenStates]) -> None:
    for item in items:
        writer.put(item)
    writer.finish()


def with_nan(item: HiddenStates) -> HiddenStates:
    return spoil(item, aux=item.aux.index_fill(0, torch.tensor([1]), float("nan")))


def with_other_tokens(item: HiddenStates) -> HiddenStates:
    sample = dataclasses.replace(item.sample, input_ids=item.sample.input_ids + np.int32(1))
    return spoil(item, sample=sample)


def with_an_empty_row(item: HiddenStates) -> HiddenStates:
    return spoil(item, aux=item.aux.index_fill(0, torch.tensor([1]), 0.0))


def with_a_repeated_row(item: HiddenStates) -> HiddenStates:
    return spoil(item, aux=torch.cat([item.aux[:1], item.aux[:1], item.aux[2:]]))


def measured(item: HiddenStates) -> HiddenStates:
    """Return states as from an engine that measures their rows."""
    return spoil(item, figures=(measure_rows(item.aux), measure_rows(item.last[:, None])[:, 0]))


@pytest.mark.parametrize("index", [2, 3, 4])  # the first, middle and last one of a shard's
@pytest.mark.parametrize("made", [measured, lambda item: item], ids=["measured by the engine", "here"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: spoil(i, aux=i.aux * torch.tensor([1.0, 0.0])[:, None]), "aux layer number 1 is all zero"),
        (lambda i: spoil(i, aux=i.aux[:, [0, 0]]), "aux layers number 0 and 1 hold the same states"),
        (lambda i: spoil(i, last=i.last / 0), "last states are not finite"),
        (with_nan, "aux states are not finite"),
        (lambda i: spoil(i, aux=i.aux * 1000), "aux layer number 0 has another magnitude"),
        (with_other_tokens, "the engine echoed other token ids"),
        (with_an_empty_row, "row 1 is all zero"),
        (with_a_repeated_row, "rows 0 and 1 of different tokens are the same"),
        (lambda i: spoil(i, aux=i.aux[:, :1]), "1 aux layers of width"),
    ],
)
def test_a_shard_with_states_that_cannot_be_its_samples_is_never_written(
    tmp_path: Path, spec: TargetSpec, change: Any, message: str, made: Any, index: int
) -> None:
    envelope = torch.tensor([[10.0, 12.0]] * 2)  # rows of width 128 and unit variance
    writer = writer_at(tmp_path, spec, envelope=envelope)
    items = [made(change(states(spec, i)) if i == index else states(spec, i)) for i in (2, 3, 4)]
    with pytest.raises(ContractError, match=f"sample s{index}: {message}"):
        put_all(writer, items)
    writer.close()
    assert read_journal(tmp_path) == {}


@pytest.mark.parametrize("rows_together", [1, 10, 2048])
def test_what_the_engine_measured_gives_the_same_table(
    tmp_path: Path, spec: TargetSpec, monkeypatch: pytest.MonkeyPatch, rows_together: int
) -> None:
    monkeypatch.setattr(writer_module, "_CHECKED_ROWS", rows_together)
    tables = []
    for name, made in (("here", lambda item: item), ("engine", measured)):
        writer = writer_at(tmp_path / name, spec)
        put_all(writer, [made(states(spec, i)) for i in range(len(SAMPLES))])
        writer.close()
        tables.append(table_of(r.figures for r in read_journal(tmp_path / name).values()))
    assert tables[0] == tables[1]


@pytest.mark.parametrize("part", ["aux", "last"])
@pytest.mark.parametrize("factor", [1.01, -1.0, 0.0, float("nan")])
def test_states_that_changed_after_the_engine_measured_them_are_refused(
    tmp_path: Path, spec: TargetSpec, part: str, factor: float
) -> None:
    whole = measured(states(spec, 0))
    changed = spoil(whole, **{part: getattr(whole, part) * factor})
    writer = writer_at(tmp_path, spec)
    with pytest.raises(ContractError, match="s0: these are not the states that the engine measured"):
        put_all(writer, [changed, states(spec, 1)])
    writer.close()


@pytest.mark.parametrize("row", [0, 16, 99])
def test_of_many_rows_the_ends_are_measured_again(spec: TargetSpec, row: int) -> None:
    (sample,) = mixed_samples([100])
    full = torch.randn(100, 3, spec.hidden_size)
    whole = measured(HiddenStates.select(sample, full[:, :2], full[:, 2]))
    aux = whole.aux.clone()
    aux[row, 0] += 1
    with pytest.raises(ContractError, match="not the states that the engine measured"):
        check_states([spoil(whole, aux=aux)], [sample], spec, lambda norms: None)
    check_states([whole], [sample], spec, lambda norms: None)


class Engine(FakeEngine):
    """Counts the samples of each call."""

    def __init__(self, spec: TargetSpec, streams: bool) -> None:
        super().__init__(None, spec)
        self.streams, self.calls = streams, list[list[str]]()

    def capture(self, samples: Any) -> Any:
        self.calls.append([])
        for sample in samples:
            self.calls[-1].append(sample.sample_id)
            yield from super().capture([sample])


@pytest.mark.parametrize("streams", [True, False])
def test_an_engine_that_does_not_stream_is_given_one_shard_at_a_time(
    tmp_path: Path, spec: TargetSpec, streams: bool
) -> None:
    engine = Engine(spec, streams)
    shards = ShardWriter(tmp_path, StoreManifest(spec, "data", (0, 2, 5, 6)))
    with CheckedShardWriter(shards, lambda *_: table_less(spec), 0) as writer:
        assert len(list(capture_into(writer, engine, SHARDS.items()))) == len(SAMPLES)
        assert sorted(record.shard for record in writer.drain()) == [0, 1, 2]
    assert list(map(len, engine.calls)) == ([6] if streams else [2, 3, 1])


def test_capture_into_is_done_when_all_is_written_and_says_what_is_lost(
    tmp_path: Path, spec: TargetSpec
) -> None:
    class Losing(Engine):
        def capture(self, samples: Any) -> Any:
            yield from (item for item in super().capture(samples) if item.sample.sample_id != "s3")

    shards = ShardWriter(tmp_path, StoreManifest(spec, "data", (0, 2, 5, 6)))
    with (
        CheckedShardWriter(shards, lambda *_: table_less(spec), 0) as writer,
        pytest.raises(ContractError, match="the engine lost 1 samples, such as s3"),
    ):
        list(capture_into(writer, Losing(spec, True), SHARDS.items()))
    assert sorted(read_journal(tmp_path)) == [0, 2]


def test_states_are_made_our_own_before_they_are_kept(tmp_path: Path, spec: TargetSpec) -> None:
    kept: list[int] = []

    def own(item: HiddenStates) -> HiddenStates:
        kept.append(len(item.sample))
        return dataclasses.replace(item, aux=item.aux.clone())

    shards = ShardWriter(tmp_path, StoreManifest(spec, "data", (0, 2, 5, 6)))
    with CheckedShardWriter(shards, lambda *_: table_less(spec), 0) as writer:
        for _ in capture_into(writer, Engine(spec, True), SHARDS.items(), own):
            pass
    assert kept == [len(s) for s in SAMPLES]


def table_less(spec: TargetSpec) -> Any:
    """Return the sums of no rows: a check that refuses nothing."""
    return (
        LayerSums.of(np.zeros((0, spec.num_aux_layers, 4), np.float32), 1),
        LayerSums.of(np.zeros((0, 1, 4), np.float32), 1),
    )
