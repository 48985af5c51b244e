"""Which process works on a run: what its folder says of it, for other processes to read."""

import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.files import read_json, write_json
from eyas.locks import is_same, started_s

FOLDER = "process"  # in the run folder


def log_path(run_dir: Path) -> Path:
    return run_dir / FOLDER / "run.log"


def progress_path(run_dir: Path) -> Path:
    return run_dir / FOLDER / "progress.json"


@contextmanager
def recorded(run_dir: Path) -> Iterator[None]:
    """Let other processes know that this one works on the run, and how it ended.

    Raises: UserError when another process does.
    """
    refuse_second(run_dir)
    path = run_dir / FOLDER / "process.json"
    value = {
        "pid": os.getpid(),
        "started": started_s(os.getpid()),
        "host": platform.node(),
        "began": time.time(),
        "command": shlex.join(sys.argv),
    }
    progress_path(run_dir).unlink(missing_ok=True)
    write_json(path, value)
    outcome = "failed"
    try:
        yield
        outcome = "finished"
    except KeyboardInterrupt:
        outcome = "stopped"
        raise
    finally:
        if path.parent.is_dir():  # a refused run takes its folder away
            write_json(path, value | {"ended": time.time(), "outcome": outcome})


def kept_files(run_dir: Path) -> dict[str, bytes]:
    """Return what is known of processes on the run, to be restored when a new one is refused."""
    paths = (run_dir / FOLDER / "process.json", progress_path(run_dir))
    return {p.name: p.read_bytes() for p in paths if p.is_file()}


def restore_files(run_dir: Path, files: dict[str, bytes]) -> None:
    folder = run_dir / FOLDER
    for name in ("process.json", "progress.json"):
        if name in files:
            (folder / name).write_bytes(files[name])
        else:
            (folder / name).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def refuse_second(run_dir: Path) -> None:
    """Raises: UserError when a living process works on the run."""
    process = read_process(run_dir)
    if process and process["pid"] != os.getpid() and is_alive(process):
        raise UserError(
            f"process {process['pid']} already works on {run_dir}",
            hint="look with eyas status, end it with eyas stop, or name another run_dir",
        )


def is_alive(process: dict[str, Any]) -> bool:
    """Whether that very process still runs here: a later one of the same number is another."""
    if process.get("host") != platform.node() or "ended" in process:
        return False
    started = process["started"]
    return isinstance(started, float) and is_same(process["pid"], started)


def read_process(run_dir: Path) -> dict[str, Any] | None:
    """Return what the last process on the run noted of itself, or None where none has worked on it."""
    path = run_dir / FOLDER / "process.json"
    value: dict[str, Any] | None = read_json(path) if path.is_file() else None
    return value
