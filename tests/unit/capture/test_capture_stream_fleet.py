"""Windows that engines elsewhere capture, without Ray: how they travel, and which machines are refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from capture_cases import make_capture_run, samples_of
from eyas.capture.stream_fleet import EngineFleet, StreamWorker, _received
from eyas.capture.windows import Unit
from eyas.errors import UserError
from eyas.train.ranks import Ranks
from eyas.types import TargetSpec


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_unit_arrives_bit_for_bit_in_the_order_that_was_asked_for(
    tmp_path: Path, tiny_target: Path, tiny_spec: TargetSpec, dtype: str
) -> None:
    spec = dataclasses.replace(tiny_spec, dtype=dtype)
    run = make_capture_run(tmp_path, tiny_target, spec, fleet={"replicas": 2})
    assert run.actors is not None
    worker = StreamWorker(run.actors.make_run, "engine")
    unit = Unit(0, 0, (4, 1))
    ((done, sent),) = worker.do([unit])
    worker.close()
    assert done == unit
    samples = samples_of(spec)["train"]
    for index, part in zip(unit.samples, sent.parts, strict=True):
        (expected,) = run.make_engine().capture([samples[index]])
        found = _received(samples[index], *part, spec)
        assert torch.equal(found.aux, expected.aux)  # type: ignore[union-attr]
        assert torch.equal(found.last, expected.last)  # type: ignore[union-attr]


def test_ray_of_this_machine_may_not_give_the_trainers_gpu_to_an_engine(
    tmp_path: Path, tiny_target: Path, tiny_spec: TargetSpec
) -> None:
    run = make_capture_run(tmp_path, tiny_target, tiny_spec, fleet={"replicas": 1, "gpus_per_replica": 1})
    with pytest.raises(UserError, match="would give the trainer's GPU to an engine"):
        EngineFleet(run, Ranks(), room=2, on_gpu=True)


class OnTwoMachines(Ranks):
    def gather(self, value: Any) -> list[Any]:
        return [value, "another"]


def test_ranks_on_two_machines_need_a_cluster_that_has_been_joined(
    tmp_path: Path, tiny_target: Path, tiny_spec: TargetSpec
) -> None:
    run = make_capture_run(tmp_path, tiny_target, tiny_spec, fleet={"replicas": 1, "gpus_per_replica": 0})
    with pytest.raises(UserError, match="and Ray would be started on one of them alone"):
        EngineFleet(run, OnTwoMachines(), room=2, on_gpu=False)
