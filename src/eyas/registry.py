"""Named implementations, imported only when asked for."""

import importlib
import importlib.metadata
from pathlib import Path
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
# Kinds of draft: a package each, whose files eyas.drafters.base lists.
DRAFTERS = {
    "dflash": "eyas.drafters.dflash",
    "dspark": "eyas.drafters.dspark",
    "eagle3": "eyas.drafters.eagle3",
}
# Packages that are installed may bring further kinds: entry points of this group, NAME = PACKAGE.
DRAFTER_GROUP = "eyas.drafters"
EXPORTERS = {
    "native": "eyas.export.native:NativeExporter",
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


def drafters() -> dict[str, str]:
    """Return the package of every kind of draft, those of other installed packages included."""
    found = {entry.name: entry.value for entry in importlib.metadata.entry_points(group=DRAFTER_GROUP)}
    return found | DRAFTERS


def drafter(name: str) -> Any:
    """Return the ``Drafter`` of a kind. Raises: UserError naming the closest known name."""
    return drafter_file(name, "drafter").DRAFTER


def has_drafter_file(name: str, file: str) -> bool:
    """Whether a kind's folder holds FILE.py. Raises: UserError naming the closest known name."""
    package = importlib.import_module(_package_of(name))
    return any(Path(folder, f"{file}.py").is_file() for folder in package.__path__)


def drafter_file(name: str, file: str) -> Any:
    """Import a file of a kind's folder: ``settings``, ``export``, ``vllm`` and the others of its list.

    Raises: UserError naming the closest known name, or the file that the kind lacks.
    """
    module = f"{_package_of(name)}.{file}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UserError(
            f"drafts of kind {name} have no {file}.py", hint="docs/extending.md lists the files of a kind"
        ) from None


def _package_of(name: str) -> str:
    if name not in DRAFTERS:
        check(drafters(), name, "draft architecture")
    return DRAFTERS.get(name) or drafters()[name]
