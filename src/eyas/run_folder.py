"""The layout of a run folder, and the record that each stage keeps of what it was made from."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import eyas
from eyas.config.load import flatten
from eyas.errors import UserError
from eyas.files import read_json, refusing_damaged, remove_folder, seal, unseal, write_json
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
# Of the records, and so of a run folder. A record of eyas 0.1 has no version.
FORMAT_VERSION = 2
# Stages of 0.1 whose folders (stores of states, exported drafts) are as they are now.
_READ_OF_0_1 = ("extract", "export")


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return what a stage noted in its folder, or None where it never began.

    Raises: ContractError for a damaged record; UserError for a folder of a format that is not read.
    """
    path = folder / "stage.json"
    if not path.is_file():
        return None
    with refusing_damaged(path, "redo the stage with --fresh"):
        record = unseal(read_json(path))
        stage, version = record["stage"], record.get("format")
        parse(_Common, {"output": None, "seconds": None} | {k: v for k, v in record.items() if k in _COMMON})
    if version != FORMAT_VERSION and not (version is None and stage in _READ_OF_0_1):
        raise UserError(
            f"{folder} was written by eyas {record.get('eyas')}; this version does not read its run folders",
            hint=f"redo it: eyas {stage} -c <run file> --fresh; or name another run_dir",
        )
    return record


@dataclass(frozen=True)
class _Common:
    """What all stages note; each adds facts of its kind."""

    inputs: dict[str, Any]
    done: bool
    output: str | None
    seconds: float | None


_COMMON = {field.name for field in fields(_Common)}


def write_record(folder: Path, stage: str, inputs: Any, **facts: Any) -> None:
    """Replace the record of a stage."""
    folder.mkdir(parents=True, exist_ok=True)
    value = {"stage": stage, "format": FORMAT_VERSION, "eyas": eyas.__version__, "inputs": inputs, **facts}
    write_json(folder / "stage.json", seal(value))


def begin_record(
    folder: Path, stage: str, inputs: Mapping[str, Any], fresh: bool, is_whole: Callable[[], bool]
) -> bool:
    """Return whether the stage has work to do; record what it is about to be made from.

    A stage that is done from the same inputs is left alone while what it wrote ``is_whole``. ``fresh``
    deletes what was written before.
    Raises: UserError when the folder was made from other inputs, naming the first that differs, or cannot be
    written.
    """
    known = json.loads(json.dumps(inputs))
    if fresh and folder.exists():
        remove_folder(folder)
    record = read_record(folder)
    if record is None and folder.is_dir() and any(folder.iterdir()):
        raise UserError(
            f"{folder} was not written by eyas {stage}",
            hint="name another run_dir, or overwrite it with --fresh",
        )
    if record is not None and record["inputs"] != known:
        raise UserError(
            _difference(folder, record["inputs"], known),
            hint=f"eyas {stage} --fresh redoes it; or name another run_dir",
        )
    if record is not None and record["done"] and is_whole():
        return False
    if record is None or record["done"]:
        try:
            write_record(folder, stage, known, done=False)
        except OSError as error:
            raise UserError(
                f"cannot write to {folder}: {error.strerror}",
                hint="set run_dir (--output-dir) to a folder on a disk that can be written",
            ) from None
    return True


def _difference(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> str:
    before, now = dict(flatten(old)), dict(flatten(new))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            return f"{folder} was written with {key} = {before.get(key)!r}; this run has {now.get(key)!r}"
    raise AssertionError("records differ but no key does")
