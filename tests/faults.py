"""Faults at named moments of a command: the moment is a file operation, the fault what a machine does.

Python reports every file operation to audit hooks before it happens. The hook here counts those that
match and strikes at one of them, so the code under test needs no door for it.
"""

import fnmatch
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Strike = Callable[[], None]


def fail(number: int) -> Strike:
    """Return a strike that raises OSError, as a full (28) or broken (5) disk does."""

    def strike() -> None:
        raise OSError(number, os.strerror(number))

    return strike


def signal_self(number: int) -> Strike:
    return lambda: os.kill(os.getpid(), number)


@dataclass
class Plan:
    """Strike at the ``nth`` operation that matches, ``event`` and a pattern of the path it is about."""

    event: str
    pattern: str
    strike: Strike
    nth: int = 1
    seen: list[str] = field(default_factory=list)

    def tell(self, event: str, path: str) -> None:
        if self.event in (event, "any") and fnmatch.fnmatch(path, self.pattern):
            self.seen.append(path)
            if len(self.seen) == self.nth:
                self.strike()


_plan: Plan | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _plan is None or event not in ("open", "os.rename", "os.remove", "shutil.rmtree"):
        return
    path = arguments[1] if event == "os.rename" else arguments[0]
    if isinstance(path, str | os.PathLike):
        _plan.tell(event, str(path))


def during(plan: Plan, command: Callable[[], Any]) -> Any:
    """Run a command with a fault planned."""
    global _plan
    if not getattr(sys, "_eyas_faults", False):
        sys.addaudithook(_hook)
        sys._eyas_faults = True  # type: ignore[attr-defined]  # a hook can never be taken back
    _plan = plan
    try:
        return command()
    finally:
        _plan = None


def in_child(command: Callable[[], int]) -> int:
    """Run a command in a child that may be killed; return its exit code, or minus the signal's number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        code = 70
        try:
            # A shell may have started the tests in the background, where it has interrupts ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            code = command()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill(plan_at: tuple[str, str, int]) -> Plan:
    event, pattern, nth = plan_at
    return Plan(event, pattern, signal_self(signal.SIGKILL), nth)


def contents(run: Path) -> dict[str, bytes]:
    """Return what a run folder holds; the order of a journal's lines is that of threads and means nothing."""
    found: dict[str, bytes] = {}
    for path in sorted(p for p in run.rglob("*") if p.is_file()):
        data = path.read_bytes()
        if path.name in ("journal.jsonl", "answers.jsonl"):
            data = b"\n".join(sorted(data.split(b"\n")))
        if path.name == "stage.json":
            record = {k: v for k, v in json.loads(data).items() if k not in ("seconds", "seal")}
            data = json.dumps(record, sort_keys=True).encode()
        if path.name == "status.json":  # what the command was doing, and when
            continue
        found[str(path.relative_to(run))] = data
    return found
