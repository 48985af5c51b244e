"""Named implementations, imported only when asked for."""

import importlib
import importlib.util
from collections.abc import Mapping
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


def drafter_file(name: str, file: str) -> Any:
    """Import a file of a draft kind's folder, such as ``vllm``: how that engine is told to serve it.

    Raises: UserError naming the closest known name, or the file that the kind lacks.
    """
    check(DRAFTS, name, "draft architecture")
    module = f"{DRAFTS[name].partition(':')[0].rpartition('.')[0]}.{file}"
    if importlib.util.find_spec(module) is None:
        raise UserError(
            f"drafts of kind {name} have no {file}.py", hint="docs/extending.md lists the files of a kind"
        )
    return importlib.import_module(module)
