"""A fleet's engines, without Ray: what each does with the shards that it is given."""

from pathlib import Path
from typing import Any

import pytest
import torch

from capture_cases import make_capture_run
from eyas.capture.fleet import ExtractWorker, Unit, common_facts, for_actors
from eyas.capture.split_work import SplitWork
from eyas.config.load import load_config
from eyas.data.prepared import read_manifest
from eyas.engines.fake.engine import FakeEngine
from eyas.engines.probe import ProbeError
from eyas.types import TargetSpec

SETTINGS = ("run_dir=run", "target.model=m", "data.sources=[a]")
FLEET = "extract.fleet={replicas: 2, gpus_per_replica: 4}"


def test_two_workers_write_one_store_each_to_its_journal(
    tmp_path: Path, tiny_target: Path, tiny_spec: TargetSpec
) -> None:
    run = make_capture_run(tmp_path, tiny_target, tiny_spec, fleet={"replicas": 2})
    assert run.actors is not None
    missing = SplitWork(run, "train", read_manifest(run.samples_folder)).missing
    one, two = (ExtractWorker(run.actors.make_run, f"engine {i} (life 1)") for i in (1, 2))
    done = [
        *one.do([Unit("train", shard) for shard in missing[:1]]),
        *two.do([Unit("train", shard) for shard in missing[1:]]),
        *two.do([Unit("held_out", 0)]),
    ]
    one.close()
    two.close()
    assert {unit for unit, _ in done} == {*(Unit("train", shard) for shard in missing), Unit("held_out", 0)}
    assert len(done) == len(missing) + 1
    assert all(unit.shard == record.shard for unit, record in done)
    assert SplitWork(run, "train", read_manifest(run.samples_folder)).missing == []
    names = {path.name for path in (tmp_path / "states" / "train").glob("journal-*")}
    assert names == {"journal-engine-1-life-1.jsonl", "journal-engine-2-life-1.jsonl"}


class Drifting(FakeEngine):
    """Gives other states than at its start, once it has captured something."""

    def capture(self, samples: Any) -> Any:
        for item in super().capture(samples):
            if not getattr(item, "sample_id", item.sample.sample_id).startswith(("probe", "prefix")):
                self.table *= 1.5
            yield item


def test_a_worker_whose_engine_has_drifted_fails_at_its_end(
    tmp_path: Path, tiny_target: Path, tiny_spec: TargetSpec
) -> None:
    run = make_capture_run(tmp_path, tiny_target, tiny_spec, Drifting, fleet={"replicas": 2})
    assert run.actors is not None
    worker = ExtractWorker(run.actors.make_run, "engine")
    assert len(list(worker.do([Unit("held_out", 0)]))) == 1
    with pytest.raises(ProbeError, match="at the start and at the end"):
        worker.close()


def test_a_worker_without_work_starts_no_engine(
    tmp_path: Path, tiny_target: Path, tiny_spec: TargetSpec
) -> None:
    def engine(*anything: object) -> Any:
        raise AssertionError("an engine was started")

    run = make_capture_run(tmp_path, tiny_target, tiny_spec, engine, fleet={"replicas": 2})
    assert run.actors is not None
    ExtractWorker(run.actors.make_run, "engine").close()


def test_what_machines_must_have_in_common_is_the_target_the_stores_and_the_versions(
    tmp_path: Path, tiny_target: Path, tiny_spec: TargetSpec
) -> None:
    run = make_capture_run(tmp_path, tiny_target, tiny_spec)
    before = common_facts(run)
    assert (before["the target"], before["torch"]) == (tiny_spec.fingerprint, torch.__version__)
    assert before[f"what {run.states_folder} holds"] == "nothing, nothing"
    SplitWork(run, "train", read_manifest(run.samples_folder))
    assert common_facts(run)[f"what {run.states_folder} holds"].endswith(", nothing")
    assert common_facts(run) != before


def test_an_actor_reads_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    config = for_actors(load_config(None, (*SETTINGS, FLEET, "extract.engine=vllm"))).config
    assert (config.run_dir, config.target.model) == (tmp_path / "run", str(tmp_path / "m"))
    assert config.vllm.engine_args == ("distributed_executor_backend=mp",)
