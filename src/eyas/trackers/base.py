"""What an experiment tracker is: it is told settings once, and figures as they come."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from eyas import registry
from eyas.errors import UserError


class Tracker(Protocol):
    """Made with (name of the run, its folder, its settings by dotted key). One adapter a file."""

    def log(self, figures: Mapping[str, float], step: int) -> None: ...

    def close(self, failed: bool) -> None: ...


def require(package: str, extra: str = "trackers") -> Any:
    """Import a tracker's package.

    Raises: UserError when it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(
            f"the tracker needs the package {package.partition('.')[0]}, which is not installed",
            hint=f"pip install 'eyas[{extra}]', or leave it out of train.trackers",
        ) from None


def figures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a row of the trainer's history as flat figures: train/loss, held_out/acceptance_rate_1, ..."""
    side = "held_out" if row.get("validation") else "train"
    found: dict[str, float] = {}
    for key, value in row.items():
        if key in ("step", "validation", "taken", "sample_ids"):
            continue
        if isinstance(value, list):
            one = key.removesuffix("s")
            found |= {f"{side}/{one}_{k}": float(v) for k, v in enumerate(value, 1)}
        elif isinstance(value, int | float):
            found[f"{side}/{key}"] = float(value)
    return found


class Trackers:
    """Those that the run names, told together; a context, so that they are closed however training ends."""

    def __init__(self, names: tuple[str, ...], run_dir: Path, settings: Mapping[str, Any]) -> None:
        made = [registry.resolve(registry.TRACKERS, name, "tracker") for name in names]
        self._all: list[Tracker] = [make(run_dir.name, run_dir, settings) for make in made]

    def log(self, row: Mapping[str, Any]) -> None:
        figures = figures_of(row)
        for tracker in self._all if figures else ():
            tracker.log(figures, int(row["step"]))

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for tracker in self._all:
            tracker.close(failed=kind is not None)
