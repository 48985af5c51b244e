"""The stages, their folders, and the record each keeps; light, for commands that only look."""

from pathlib import Path
from typing import Any

from eyas.files import read_json, refusing_damaged, unseal

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
        record["inputs"], record["done"]
    return record
