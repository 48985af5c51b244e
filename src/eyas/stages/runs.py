"""runs: the run folders below a folder, each with how far it is and what was measured."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.progress_displays import duration, size
from eyas.provenance import stage_states
from eyas.run_folder import records_of, settings_of

_DEEPEST = 3


@dataclass(frozen=True)
class Run:
    """``stage``: the last one that is done. ``acceptance``: None where nothing current was measured."""

    folder: str
    draft: str
    stage: str
    stale: str | None
    acceptance: float | None
    interval: tuple[float, float] | None
    age_s: float
    num_bytes: int


def list_runs(folders: Sequence[Path]) -> list[Run]:
    """Return the runs in ``folders``, newest first. Raises: UserError where there are none."""
    found = sorted({run for folder in folders for run in _run_folders(folder)})
    if not found:
        raise UserError(
            f"there are no runs in {', '.join(map(str, folders))}", hint="name folders: eyas runs FOLDER"
        )
    return sorted(map(_described, found), key=lambda run: run.age_s)


def print_runs(runs: Sequence[Run]) -> None:
    """Print a table on stdout."""
    rows = [("run", "draft", "done", "acceptance length", "age", "size")]
    for run in runs:
        measured = "–" if run.acceptance is None else f"{run.acceptance:.3f}"
        if run.interval is not None:
            measured += f" ({run.interval[0]:.2f} to {run.interval[1]:.2f})"
        done = f"{run.stage}, stale: {run.stale}" if run.stale else run.stage
        rows.append((run.folder, run.draft, done, measured, duration(run.age_s), size(run.num_bytes)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def to_json(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [asdict(run) for run in runs]


def bytes_in(folder: Path) -> int:
    """Return what a folder takes on disk; what a link leads to belongs to another run."""
    if folder.is_symlink():
        return 0
    entries = folder.rglob("*") if folder.is_dir() else iter([folder])
    return sum(p.lstat().st_size for p in entries if p.is_file() and not p.is_symlink())


def _run_folders(folder: Path, deep: int = 0) -> list[Path]:
    # A run file alone, next to run folders, makes no run.
    worked = any((folder / name).exists() for name in ("prepared", "states", "process"))
    if worked and (folder / "run.yaml").is_file():
        return [folder]
    if deep == _DEEPEST or not folder.is_dir():
        return []
    inner = (p for p in folder.iterdir() if p.is_dir() and not p.is_symlink() and not p.name.startswith("."))
    return [run for path in inner for run in _run_folders(path, deep + 1)]


def _described(folder: Path) -> Run:
    records, settings = records_of(folder), settings_of(folder)
    states = stage_states(records, settings)
    done = [stage for stage, state in states.items() if state.state in ("done", "stale")]
    stale = next((f"{stage} ({state.cause})" for stage, state in states.items() if state.cause), None)
    record = records["evaluate"]
    report = record["report"] if record and states["evaluate"].state == "done" else {}
    interval = report.get("acceptance_interval")
    return Run(
        folder=str(folder),
        draft=settings["draft"]["architecture"],
        stage=done[-1] if done else "–",
        stale=stale,
        acceptance=report.get("acceptance"),
        interval=(interval[0], interval[1]) if interval else None,
        age_s=time.time()
        - max(p.stat().st_mtime for p in (folder / "run.yaml", *folder.glob("*/stage.json"))),
        num_bytes=bytes_in(folder),
    )
