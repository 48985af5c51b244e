"""The stages, their folders, and the record each keeps; light, for commands that only look."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from eyas.files import read_json, refusing_damaged, unseal
from eyas.typed_json import parse

STAGES = ("prepare", "regenerate", "extract", "train", "export", "evaluate")
FOLDERS = {
    "prepare": "prepared",
    "regenerate": "regenerated",
    "extract": "states",
    "train": "checkpoints",
    "export": "draft",
    "evaluate": "evaluation",
}


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return what a stage noted in its folder, or None where it never began.

    Raises: ContractError for a damaged record.
    """
    path = folder / "stage.json"
    if not path.is_file():
        return None
    with refusing_damaged(path, "redo the stage with --fresh"):
        record = unseal(read_json(path))
        parse(_Common, {"output": None, "seconds": None} | {k: v for k, v in record.items() if k in _COMMON})
    return record


@dataclass(frozen=True)
class _Common:
    """What all stages note; each adds facts of its kind."""

    inputs: dict[str, Any]
    done: bool
    output: str | None
    seconds: float | None


_COMMON = {field.name for field in fields(_Common)}
