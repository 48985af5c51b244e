"""The stages, their folders, and the record each keeps; light, for commands that only look."""

from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.files import read_json, unseal

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

    Raises: EyasError for a damaged record.
    """
    path = folder / "stage.json"
    if not path.is_file():
        return None
    try:
        record = unseal(read_json(path))
        record["inputs"], record["done"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise EyasError(f"{path} is damaged: {error}", hint="redo the stage with --fresh") from None
    return record
