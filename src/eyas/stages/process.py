"""The process that works on a run: started detached, looked at, listened to, stopped."""

import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.errors import EyasError, UserError
from eyas.files import read_json
from eyas.progress import say
from eyas.provenance import stage_states
from eyas.run_folder import records_of
from eyas.run_process import is_alive, log_path, progress_path, read_process, refuse_second

_STOP_S = 60.0


def detach(run_dir: Path, path: Path | None, flags: Sequence[str], settings: Sequence[str]) -> None:
    """Start ``eyas run`` in a session of its own that outlives the terminal, and say how to reach it.

    Raises: UserError when another process works on the run.
    """
    refuse_second(run_dir)
    where = ["-c", str(path)] if path else []
    pid = _start(run_dir, [*where, *flags, *settings])
    say(f"process {pid} works on {run_dir}; this terminal may be closed")
    there = shlex.join([*where, *settings])
    for verb in ("status", "logs", "stop"):
        say(f"  eyas {verb} {there}")


def _start(run_dir: Path, arguments: Sequence[str]) -> int:
    log = log_path(run_dir)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "eyas", "run", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    child.returncode = 0  # it outlives this process, and nobody waits for it
    return child.pid


def status(run_dir: Path, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what is known of the run: stages, the process, what it is doing.

    A stage that was made with other ``settings`` than these is stale.

    Raises: UserError when there is no such run.
    """
    if not run_dir.is_dir():
        raise UserError(f"there is no run in {run_dir}", hint="start it: eyas run -c <run file>")
    process = read_process(run_dir)
    alive = process is not None and is_alive(process)
    doing = read_json(progress_path(run_dir)) if progress_path(run_dir).is_file() else {}
    records = records_of(run_dir)
    found = stage_states(records, settings)
    stages: dict[str, dict[str, Any]] = {}
    for name, record in records.items():
        state: str = found[name].state
        if alive and doing.get("stages", {}).get(name, {}).get("state") == "running":
            state = "running"
        stages[name] = {"state": state, "cause": found[name].cause, "seconds": (record or {}).get("seconds")}
    outcome = "never run" if process is None else "running" if alive else process.get("outcome", "died")
    if process and not alive and process.get("host") != platform.node() and "ended" not in process:
        outcome = f"unknown: it ran on {process['host']}"
    if outcome == "finished" and any(stage["cause"] for stage in stages.values()):
        outcome = "stale"
    return {
        "run_dir": str(run_dir),
        "state": outcome,
        "pid": process["pid"] if process and alive else None,
        "stages": stages,
        "progress": doing.get("progress") if alive else None,
        "text": doing.get("text") if alive else None,
        "log": str(log_path(run_dir)) if log_path(run_dir).is_file() else None,
    }


def print_status(found: dict[str, Any]) -> None:
    """Print ``status`` for a person on stdout."""
    pid = f", process {found['pid']}" if found["pid"] else ""
    print(f"{found['run_dir']}: {found['state']}{pid}")
    for name, stage in found["stages"].items():
        took = f"{stage['seconds']:.0f} s" if stage["seconds"] is not None else ""
        why = f"{took:<8} {stage['cause']}" if stage["cause"] else took
        print(f"  {name:<11} {stage['state']:<10} {why}".rstrip())
    if found["text"]:
        print(found["text"])
    if found["state"] == "died":
        print("it ended without a word (killed, or the machine restarted); eyas run goes on where it was")


def follow(run_dir: Path, num_lines: int, on: bool) -> Iterator[str]:
    """Yield the last lines of a detached run's log, and with ``on`` those that come while it lives.

    Raises: UserError when there is none.
    """
    path = log_path(run_dir)
    if not path.is_file():
        raise UserError(f"{run_dir} has no log", hint="logs are written by: eyas run --detach")
    with path.open(encoding="utf-8", errors="replace") as f:
        lines = f.readlines()
        yield from lines[-num_lines:] if num_lines else lines
        while on:
            process = read_process(run_dir)
            alive = process is not None and is_alive(process)
            yield from f.readlines()
            if not alive:
                return
            time.sleep(0.5)


def stop(run_dir: Path, wait_s: float = _STOP_S) -> str:
    """Interrupt the process as Ctrl-C would, and wait for its end; return what happened.

    Raises: UserError when nothing runs; EyasError when it does not end in time.
    """
    process = read_process(run_dir)
    if process is None or not is_alive(process):
        raise UserError(f"nothing works on {run_dir} here", hint="see: eyas status")
    os.kill(process["pid"], signal.SIGTERM)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if not is_alive(read_process(run_dir) or process):
            return f"stopped process {process['pid']}; eyas run goes on where it was"
        time.sleep(0.1)
    raise EyasError(
        f"process {process['pid']} has not ended after {wait_s:.0f} s",
        hint=f"wait, or end it hard with: kill -9 {process['pid']}; complete work is kept either way",
    )
