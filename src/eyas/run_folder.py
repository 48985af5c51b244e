"""The layout of a run folder, and the record that each stage keeps of what it was made from."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

import eyas
from eyas.errors import EyasError, UserError
from eyas.files import read_json, refusing_damaged, remove_folder, removing, seal, unseal, write_json
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


def redo_folder(folder: Path) -> Path:
    """Return where a stage whose output exists is done again, until the new output is complete."""
    return folder.with_name(f"{folder.name}.redo")


def finished_folder(folder: Path) -> Path:
    """Return the stage's folder, or the new output of a process killed before it was put in place."""
    return folder if os.path.lexists(folder) or not _is_done(redo_folder(folder)) else redo_folder(folder)


def records_of(run_dir: Path) -> dict[str, dict[str, Any] | None]:
    """Return what each stage of a run recorded, in order. Raises: as ``read_record``."""
    return {stage: read_record(finished_folder(run_dir / name)) for stage, name in FOLDERS.items()}


def readable_records_of(run_dir: Path) -> dict[str, dict[str, Any] | None]:
    """As ``records_of``, with None for what cannot be read."""
    return {stage: readable_record(finished_folder(run_dir / name)) for stage, name in FOLDERS.items()}


def check_is_run(folder: Path) -> None:
    """Raises: UserError for a folder that is no run."""
    if not (folder / "run.yaml").is_file():
        raise UserError(f"{folder} is not a run folder", hint="name folders that hold a run.yaml")


def settings_of(run_dir: Path) -> dict[str, Any]:
    """Return the settings in a run's own run.yaml, nested; relative paths start at the run folder."""
    settings: dict[str, Any] = yaml.safe_load((run_dir / "run.yaml").read_text(encoding="utf-8"))
    return settings


def draft_folder_of(folder: Path) -> Path:
    """Return the draft of a run folder; another folder is a draft itself."""
    return finished_folder(folder / FOLDERS["export"]) if (folder / "run.yaml").is_file() else folder


def put_in_place(folder: Path) -> None:
    """Replace the output of a stage by the new one next to it, if that is complete."""
    redone = redo_folder(folder)
    if not _is_done(redone):
        return
    if os.path.lexists(folder):
        with removing(folder):
            redone.replace(folder)
    else:
        redone.replace(folder)


def begin_record(
    folder: Path,
    stage: str,
    inputs: Mapping[str, Any],
    is_whole: Callable[[], bool],
    why: Callable[[Mapping[str, Any], Mapping[str, Any]], str],
    *,
    again: str,
    fresh: bool = False,
    may_differ: bool = False,
) -> Path | None:
    """Return the folder to work in, or None where the stage is done; record what it is about to be made from.

    A stage that is done from the same inputs is left unchanged while what it wrote ``is_whole``. With
    ``fresh``, or when the inputs are others and they ``may_differ``, it is done again: next to a finished
    output, which stays until the new one is complete. ``why`` says in words how inputs differ; ``again`` is
    the command that does the stage again.
    Raises: UserError when the output was made from other inputs, or the folder cannot be written.
    """
    known = json.loads(json.dumps(inputs))
    put_in_place(folder)
    if folder.is_symlink() and not (_is_made_from(folder, known) and is_whole()):
        folder.unlink()  # another run's output that has changed
    redone = redo_folder(folder)
    unfinished = readable_record(redone)
    resumed = unfinished is not None and unfinished["inputs"] == known
    if not fresh:
        record = read_record(folder)
        if record is None and folder.is_dir() and any(folder.iterdir()):
            raise UserError(
                f"{folder} was not written by eyas {stage}",
                hint="name another run_dir, or overwrite it with --fresh",
            )
        if record is None or record["inputs"] == known:
            if record is not None and record["done"] and is_whole():
                return None
            if record is None or record["done"]:
                _write_first_record(folder, stage, known)
            _remove(redone)
            return folder
        if not (may_differ or resumed):
            raise UserError(
                f"{folder} is stale: {why(record['inputs'], known)}",
                hint=f"do it again: {again}; or name another run_dir",
            )
    if not resumed:
        _remove(redone)
    if (found := readable_record(folder)) is not None and not found["done"]:
        _remove(folder)
    at = redone if os.path.lexists(folder) else folder
    if not (resumed and at == redone):
        _write_first_record(at, stage, known)
    return at


def link_to_base(folder: Path, base: Path, inputs: Mapping[str, Any]) -> bool:
    """Let a stage without output take the finished one of another run, if that has the same inputs.

    The link is relative, so that runs may be moved together.
    """
    taken = not folder.exists() and _is_made_from(base, json.loads(json.dumps(inputs)))
    if taken:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.unlink(missing_ok=True)
        folder.symlink_to(os.path.relpath(base.resolve(), folder.parent.resolve()))
    return taken


def _is_made_from(folder: Path, inputs: Any) -> bool:
    record = readable_record(folder)
    return record is not None and bool(record["done"]) and record["inputs"] == inputs


def _write_first_record(folder: Path, stage: str, inputs: Any) -> None:
    try:
        write_record(folder, stage, inputs, done=False)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}",
            hint="set run_dir (--output-dir) to a folder on a disk that can be written",
        ) from None


def readable_record(folder: Path) -> dict[str, Any] | None:
    """As ``read_record``; None also for a record that is damaged or of another version."""
    try:
        return read_record(folder)
    except EyasError:
        return None


def _is_done(folder: Path) -> bool:
    record = readable_record(folder)
    return record is not None and bool(record["done"])


def _remove(folder: Path) -> None:
    if os.path.lexists(folder):
        remove_folder(folder)
