"""What a draft's folder is worth: the held-out answers of the run, replayed in float32."""

import importlib.metadata
import platform
import time
from pathlib import Path
from typing import Any

import torch

from eyas import registry
from eyas.drafters.common.acceptance import Acceptance
from eyas.evaluate.acceptance import predict_acceptance
from eyas.evaluate.bootstrap import length_interval
from eyas.export.read import read_draft
from eyas.targets.teacher import read_teacher
from harness_answers import Answers

_PACKAGES = ("eyas", "speculators", "specforge", "torch", "transformers", "triton")


def measure(answers: Answers, folder: Path, depths: list[int]) -> dict[str, Any]:
    """Return lengths at each K with their 95 % intervals, and each prompt's rounds, by which tables are made.

    Raises: ValueError for a draft that reads other layers than those that it is given here.
    """
    context, states = answers.context, answers.held_out
    device = torch.device(context.train_device)
    stored = read_draft(folder)
    if stored.aux_layer_ids not in (None, states.spec.aux_layer_ids):
        raise ValueError(
            f"{folder} reads layers {stored.aux_layer_ids}, the run has {states.spec.aux_layer_ids}"
        )
    teacher = read_teacher(context.target_folder, context.spec).to(device, torch.float32)
    draft = stored.build(teacher.embedding.cpu(), teacher.head.cpu()).to(device).float()
    names = [states.sample(i).sample_id for i in range(len(states.lengths))]
    held_out: dict[str, Any] = {}
    for depth in depths:
        found = predict_acceptance(
            registry.drafter(stored.architecture),
            draft,
            teacher,
            stored.target_ids.to(device),
            states,
            range(len(names)),
            depth,
            1 << 30,
        )
        total = sum(found, Acceptance.empty(depth))
        interval = length_interval(found)
        held_out[str(depth)] = {
            "length": round(total.length, 4),
            "interval": interval and [round(bound, 4) for bound in interval],
            "rounds": {n: [f.num_rounds, *f.accepted_at] for n, f in zip(names, found, strict=True)},
        }
    spec = context.spec
    return {
        "target": Path(spec.model).name,
        "width": spec.hidden_size,
        "prompts": len(names),
        "held_out": held_out,
    }


def conditions() -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or "cpu",
        "versions": {name: v for name in _PACKAGES if (v := _version(name))},
        "date": time.strftime("%Y-%m-%d"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
