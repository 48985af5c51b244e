"""Named implementations, imported only when asked for."""

import importlib
from typing import Any

from eyas.errors import UserError, did_you_mean

ENGINES = {
    "fake": "eyas.engines.fake:FakeEngine",
    "transformers": "eyas.engines.transformers:TransformersEngine",
    "vllm": "eyas.engines.vllm.engine:VllmEngine",
}
DRAFTS = {
    "eagle3": "eyas.drafters.eagle3.model:Eagle3Draft",
}
EXPORTERS = {
    "vllm": "eyas.export.native:VllmExporter",
    "speculators": "eyas.export.speculators:SpeculatorsExporter",
}

TRACKERS = {
    "mlflow": "eyas.trackers.mlflow:MlflowTracker",
    "tensorboard": "eyas.trackers.tensorboard:TensorBoardTracker",
    "trackio": "eyas.trackers.trackio:TrackioTracker",
    "wandb": "eyas.trackers.wandb:WandbTracker",
}


def check(table: dict[str, str], name: str, kind: str) -> None:
    """Refuse a name that is not in ``table``; nothing is imported.

    Raises: UserError naming the closest known name.
    """
    if name not in table:
        raise UserError(
            f"unknown {kind} {name!r}{did_you_mean(name, table)}", hint=f"known: {', '.join(sorted(table))}"
        )


def resolve(table: dict[str, str], name: str, kind: str) -> Any:
    """Import the class registered under ``name``.

    Raises: UserError naming the closest known name.
    """
    check(table, name, kind)
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
