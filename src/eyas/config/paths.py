"""A path that a user wrote: ``~`` is the home folder, and environment variables are not read.

A relative path in a run file starts at that file's folder, one on the command line at the current folder.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.errors import UserError

# Settings that hold a path, or a name that may be one. A list may hold {path: ...}.
PATH_SETTINGS = (
    "run_dir",
    "base_run",
    "target.model",
    "data.sources",
    "extract.prepared_data",
    "extract.states_dir",
    "vllm.staging_dir",
    "draft.init_from",
    "evaluate.benchmarks",
)
# Those that may be a name instead.
_NAMES = ("target.model", "draft.init_from", "evaluate.benchmarks")


def expand_home(text: str) -> str:
    """Return ``text`` with a leading ``~`` or ``~user`` replaced by that home folder.

    Raises: UserError when there is no such home folder.
    """
    if not text.startswith("~"):
        return text
    try:
        return str(Path(text).expanduser())
    except RuntimeError:
        raise UserError(
            f"{text} names a home folder that does not exist", hint="write the whole path, or ./~ for a name"
        ) from None


def expand_paths(values: dict[str, Any]) -> None:
    """Expand the home folder in every path among nested settings in place."""
    _change_paths(values, lambda key, text: expand_home(text))


def paths_from(folder: Path, values: dict[str, Any]) -> None:
    """Make the relative paths of a file in ``folder`` relative to here, in place.

    A name of the hub or of a benchmark stays one, unless it starts with a dot or the file exists.
    """

    def joined(key: str, text: str) -> str:
        is_path = key not in _NAMES or text.startswith(".") or (folder / text).exists()
        return os.path.normpath(folder / text) if is_path and _is_relative(text) else text

    if folder != Path():
        _change_paths(values, joined)


def paths_to(folder: Path, values: dict[str, Any]) -> None:
    """The reverse of ``paths_from``: make paths relative to ``folder``, for a file that is written there."""

    def moved(key: str, text: str) -> str:
        is_path = key not in _NAMES or text.startswith(".") or Path(text).exists()
        return os.path.relpath(text, folder) if is_path and _is_relative(text) else text

    _change_paths(values, moved)


def _is_relative(text: str) -> bool:
    return not text.startswith(("/", "~", "hf:", "demo:")) and "://" not in text and text != "-"


def _change_paths(values: dict[str, Any], change: Callable[[str, str], str]) -> None:
    for key in PATH_SETTINGS:
        *sections, leaf = key.split(".")
        section: Any = values
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and leaf in section:
            section[leaf] = _changed(section[leaf], functools.partial(change, key))


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    if isinstance(value, dict) and "path" in value:
        return {**value, "path": _changed(value["path"], change)}
    return value
