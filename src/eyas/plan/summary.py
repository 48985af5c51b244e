"""A whole plan: what a run would do, and how it is shown."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from eyas.plan.estimates import Tokens
from eyas.plan.gpu_use import GpuUse
from eyas.plan.requirements import Need
from eyas.plan.stage_times import StagePlan
from eyas.plan.target_size import TargetSize
from eyas.progress_displays import duration, size


@dataclass(frozen=True)
class Plan:
    shape: TargetSize
    tokens: Tokens
    bytes_per_token: int
    draft_parameters: int
    learning_rate: float
    disk: list[Need]
    memory: list[Need]
    stages: list[StagePlan]
    notes: list[str] = field(default_factory=list)
    gpus: list[GpuUse] = field(default_factory=list)  # empty: a machine without

    @property
    def seconds(self) -> float | None:
        """Seconds of all stages, or None where one is unknown."""
        known = [s.seconds for s in self.stages if s.seconds is not None]
        return sum(known) if len(known) == len(self.stages) else None

    def to_json(self) -> dict[str, Any]:
        needs = lambda rows: [dataclasses.asdict(n) | {"fits": n.fits} for n in rows]  # noqa: E731
        return {
            "target": {
                "model": self.shape.spec.model,
                "architecture": self.shape.spec.architecture,
                "aux_layer_ids": list(self.shape.spec.aux_layer_ids),
                "num_parameters": self.shape.num_parameters,
                "weight_bytes": self.shape.weight_bytes,
                "weight_basis": self.shape.weight_basis,
                "kv_bytes_per_token": self.shape.kv_bytes_per_token,
            },
            "tokens": dataclasses.asdict(self.tokens),
            "bytes_per_token": self.bytes_per_token,
            "draft_parameters": self.draft_parameters,
            "learning_rate": self.learning_rate,
            "disk": needs(self.disk),
            "memory": needs(self.memory),
            "stages": [dataclasses.asdict(s) for s in self.stages],
            "seconds": self.seconds,
            "notes": self.notes,
            "gpus": [dataclasses.asdict(use) for use in self.gpus],
        }


def print_plan(found: Plan) -> None:
    """Print the plan for a person on stdout."""
    shape, tokens = found.shape, found.tokens
    layers = ", ".join(map(str, shape.spec.aux_layer_ids))
    print(f"target   {shape.spec.model} ({shape.spec.architecture}), {size(shape.weight_bytes)} of weights "
          f"by {shape.weight_basis}; aux layers {layers}")  # fmt: skip
    print(f"draft    {found.draft_parameters / 1e6:,.1f} million trained parameters, "
          f"learning rate {found.learning_rate:g}")  # fmt: skip
    print(f"data     {tokens.total:,.0f} tokens ({tokens.supervised_share:.0%} supervised), {tokens.basis}")
    print(f"states   {found.bytes_per_token:,} bytes a supervised token")
    print()
    for need in [*found.disk, *found.memory]:
        of = "" if need.available is None else f" of {size(need.available)}"
        verdict = {True: "  fits", False: "  DOES NOT FIT", None: ""}[need.fits]
        print(f"{need.what:<46} {size(need.bytes):>10}{of}{verdict}")
        print(f"{'':<4}{need.basis}")
    print()
    for use in found.gpus:
        which = f"GPUs 0 to {use.num_gpus - 1}" if use.num_gpus > 1 else "GPU 0"
        verdict = "fits" if use.trouble is None else f"REFUSED: {use.trouble}"
        print(f"{use.stage:<11} {use.process} on {which}: {size(use.bytes)} of {size(use.available)} each, "
              f"{verdict}")  # fmt: skip
    if found.gpus:
        print()
    for stage in found.stages:
        took = "?" if stage.seconds is None else duration(stage.seconds)
        print(f"{stage.stage:<11} {stage.state:<6} {took:>12}  {stage.work}")
        print(f"{'':<32}{stage.basis}")
    total = found.seconds
    print(f"{'in all':<11} {'':<6} {'?' if total is None else duration(total):>12}")
    for note in found.notes:
        print(f"note: {note}")
