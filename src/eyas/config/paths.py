"""A path that a user wrote: ``~`` is the home folder, and environment variables are not read."""

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
    """Expand every path among nested settings in place."""
    for key in PATH_SETTINGS:
        *sections, leaf = key.split(".")
        section: Any = values
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and leaf in section:
            section[leaf] = _expanded(section[leaf])


def _expanded(value: Any) -> Any:
    if isinstance(value, str):
        return expand_home(value)
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    if isinstance(value, dict) and "path" in value:
        return {**value, "path": _expanded(value["path"])}
    return value
