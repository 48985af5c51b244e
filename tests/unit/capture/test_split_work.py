"""What is missing of a split, and the samples of it."""

from pathlib import Path

import pytest

from capture_cases import make_capture_run, samples_of
from eyas.capture.in_process import capture_in_process
from eyas.capture.split_work import SplitWork
from eyas.data.prepared import read_manifest
from eyas.engines.fake.engine import FakeEngine
from eyas.errors import EyasError, UserError
from eyas.store.shards import ShardStore
from eyas.types import TargetSpec


def test_the_missing_shards_hold_all_samples_in_their_order(
    tmp_path: Path, tiny_target: Path, tiny_spec: TargetSpec
) -> None:
    run = make_capture_run(tmp_path, tiny_target, tiny_spec)
    work = SplitWork(run, "train", read_manifest(run.samples_folder))
    shards = dict(work.shards())
    assert list(shards) == work.missing == list(range(len(work.bounds) - 1))
    assert len(shards) > 1
    ids = [s.sample_id for samples in shards.values() for s in samples]
    assert ids == [s.sample_id for s in samples_of(tiny_spec)["train"]]
    assert work.num_tokens == work.missing_tokens == sum(len(s) for part in shards.values() for s in part)


def test_a_shard_can_be_asked_for_after_a_later_one(
    tmp_path: Path, tiny_target: Path, tiny_spec: TargetSpec
) -> None:
    run = make_capture_run(tmp_path, tiny_target, tiny_spec)
    work = SplitWork(run, "train", read_manifest(run.samples_folder))
    (later,), (first,) = work.shards([1]), work.shards([0])
    assert later[1][0].sample_id != first[1][0].sample_id
    assert first[1][0].sample_id == "sample-0"


def test_a_sample_that_no_engine_can_compute_is_refused_before_an_engine_starts(
    tmp_path: Path, tiny_target: Path, tiny_spec: TargetSpec
) -> None:
    run = make_capture_run(tmp_path, tiny_target, tiny_spec)
    object.__setattr__(run, "max_length", 6)
    with pytest.raises(UserError, match=r"tokens, more than data.max_length \(6\)"):
        SplitWork(run, "train", read_manifest(run.samples_folder))


def test_one_engine_captures_every_split_and_a_second_time_nothing_is_missing(
    tmp_path: Path, tiny_target: Path, tiny_spec: TargetSpec
) -> None:
    run = make_capture_run(tmp_path, tiny_target, tiny_spec)
    manifest = read_manifest(run.samples_folder)
    capture_in_process(run, [SplitWork(run, split, manifest) for split in run.splits])
    assert [SplitWork(run, split, manifest).missing for split in run.splits] == [[], []]
    store = ShardStore(run.states_folder / "train")
    (expected,) = run.make_engine().capture([samples_of(tiny_spec)["train"][4]])
    assert (store.read(4).aux == expected.aux).all()  # type: ignore[union-attr]


def test_failures_of_all_splits_count_together(
    tmp_path: Path, tiny_target: Path, tiny_spec: TargetSpec
) -> None:
    failing = frozenset({"sample-1", "sample-7"})

    def engine(folder: Path, spec: TargetSpec) -> FakeEngine:
        return FakeEngine(folder, spec, fails=failing)

    run = make_capture_run(tmp_path, tiny_target, tiny_spec, engine, max_failures=1)
    works = [SplitWork(run, split, read_manifest(run.samples_folder)) for split in run.splits]
    with pytest.raises(EyasError, match=r"1 samples failed, more than extract\.max_failures=0"):
        capture_in_process(run, works)
