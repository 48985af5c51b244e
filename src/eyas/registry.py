"""Named implementations, imported only when asked for."""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from eyas.errors import UserError, did_you_mean

# Facts of engines; light to import. Each names its classes, which are imported when an engine starts.
ENGINES = {
    "fake": "eyas.engines.fake.info:INFO",
    "sglang": "eyas.engines.sglang.info:INFO",
    "transformers": "eyas.engines.transformers.info:INFO",
    "vllm": "eyas.engines.vllm.info:INFO",
}
REFERENCE_ENGINE = "transformers"  # others are compared with it; it decodes in this process
SERVING_ENGINE = "vllm"  # what eyas serve starts unless told otherwise
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
    """Import what is registered under ``name``.

    Raises: UserError naming the closest known name.
    """
    check(table, name, kind)
    return load(table[name])


def load(target: str) -> Any:
    """Import ``module:name``."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def draft_kind(config: Mapping[str, Any]) -> str:
    """Return the kind of the draft that a config.json describes."""
    return str(config.get("eyas", {}).get("architecture", "eagle3"))


def serving_module(kind: str, engine: str) -> ModuleType:
    """Import the file in a draft kind's folder that says how ``engine`` is told to serve such a draft.

    Raises: UserError when the folder has no file for that engine.
    """
    check(DRAFTS, kind, "draft architecture")
    name = f"{DRAFTS[kind].partition(':')[0].rpartition('.')[0]}.{engine}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UserError(
            f"{engine} is not known to serve a draft of the kind {kind}",
            hint="serve it with another engine (eyas serve --engine)",
        ) from None
