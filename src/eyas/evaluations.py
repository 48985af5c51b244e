"""Several evaluations of one draft: ``evaluation`` is the newest, ``evaluations/NAME`` are the others."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.files import fingerprint, remove_folder
from eyas.run_folder import FOLDERS, readable_record

_NEWEST, _OTHERS = FOLDERS["evaluate"], "evaluations"
# Inputs that say what is measured, not how.
_MEASURED = ("draft", "states")


def keep_other(run_dir: Path, inputs: Mapping[str, Any]) -> None:
    """Put the newest evaluation among the others, if it is finished and its settings are not ``inputs``'."""
    newest = run_dir / _NEWEST
    record = readable_record(newest)
    if record is not None and record["done"] and _how(record["inputs"]) != _how(inputs):
        _move(newest, run_dir / _OTHERS / _name(record["inputs"]))


def bring_back(run_dir: Path, inputs: Mapping[str, Any]) -> bool:
    """Make a finished evaluation of exactly these ``inputs`` the newest, if it is among the others.

    Returns whether it was.
    """
    other = run_dir / _OTHERS / _name(inputs)
    record = readable_record(other)
    if record is None or not record["done"] or record["inputs"] != json.loads(json.dumps(inputs)):
        return False
    keep_other(run_dir, inputs)
    if not (run_dir / _NEWEST).exists():
        _move(other, run_dir / _NEWEST)
    return True


def other_evaluations(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the records of the others by name."""
    found = {folder.name: readable_record(folder) for folder in sorted((run_dir / _OTHERS).glob("*"))}
    return {name: record for name, record in found.items() if record is not None and record["done"]}


def _move(folder: Path, to: Path) -> None:
    to.parent.mkdir(exist_ok=True)
    if to.exists():
        remove_folder(to)
    folder.replace(to)


def _how(inputs: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps({key: value for key, value in inputs.items() if key not in _MEASURED}))


def _name(inputs: Mapping[str, Any]) -> str:
    settings = inputs["evaluate"]
    where = "endpoint" if settings["endpoint"] else settings["engine"]
    return f"{where}-k{settings['num_draft_tokens']}-{fingerprint(_how(inputs))[:6]}"
