"""Faults at named moments of a command: the moment is a file operation, the fault what a machine does.

Python reports every file operation to audit hooks before it happens. The hook here counts those that
match and strikes at one of them, so the code under test needs no door for it.
"""

import fnmatch
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from machine import clean_processes
from pipeline import Screen, eyas

Strike = Callable[[], None]


def fail(number: int) -> Strike:
    """Return a strike that raises OSError, as a full (28) or broken (5) disk does."""
    return partial(_raise, number)


def _raise(number: int) -> None:
    raise OSError(number, os.strerror(number))


def signal_self(number: int) -> Strike:
    return partial(_signal_self, number)


def _signal_self(number: int) -> None:
    os.kill(os.getpid(), number)


@dataclass
class Plan:
    """Strike at the ``nth`` operation that matches, ``event`` and a pattern of the path it is about.

    ``event`` is the name of an audit event, ``any``, or ``change``: all but opening to read.
    """

    event: str
    pattern: str
    strike: Strike
    nth: int = 1
    seen: list[str] = field(default_factory=list)

    def tell(self, event: str, path: str, is_change: bool) -> None:
        is_meant = self.event in (event, "any") or (self.event == "change" and is_change)
        if is_meant and fnmatch.fnmatch(path, self.pattern):
            self.seen.append(path)
            if len(self.seen) == self.nth:
                self.strike()


_plan: Plan | None = None


# Where each event has its path, and the descriptor of the folder that the path starts from.
_PLACES: dict[str, tuple[int, int | None]] = {
    "open": (0, None),
    "os.rename": (1, 3),
    "os.remove": (0, 1),
    "os.rmdir": (0, 1),
    "os.mkdir": (0, 2),
    "os.truncate": (0, None),
    "shutil.rmtree": (0, None),
}


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _plan is None or event not in _PLACES:
        return
    place, folder = _PLACES[event]
    path = arguments[place]
    if isinstance(path, str | os.PathLike):
        text = str(path)
        if folder is not None and isinstance(arguments[folder], int) and arguments[folder] >= 0:
            text = os.path.join(os.readlink(f"/proc/self/fd/{arguments[folder]}"), text)
        _plan.tell(event, text, event != "open" or _writes(*arguments[1:]))


def _writes(mode: str | None, flags: int) -> bool:
    if mode is None:
        return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return not set("wax+").isdisjoint(mode)


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


def in_child(plan: Plan, *arguments: str | Path) -> Screen:
    """Run ``eyas`` with a fault planned, in a child that may be killed; its code is then minus the signal.

    Children come from a server of their own, so nothing that other tests left in this process is theirs.
    """
    start = clean_processes()
    told, tell = start.Pipe(duplex=False)
    child = start.Process(target=_run, args=(plan, arguments, tell))
    child.start()
    tell.close()
    try:
        screen: Screen = told.recv()
    except EOFError:
        screen = Screen(0, "", "")
    finally:
        told.close()
    child.join()
    code = child.exitcode
    child.close()
    assert code is not None
    return Screen(code, screen.out, screen.err)


def _run(plan: Plan, arguments: tuple[str | Path, ...], tell: Connection) -> None:
    # A shell may have started the tests in the background, where interrupts are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    screen = during(plan, lambda: eyas(*arguments))
    tell.send(screen)
    sys.exit(screen.code)


# Times, and what a stream counts since it last started.
_NOT_COMPARED = ("seconds", "seal", "stream")


def _lasting(value: Any) -> Any:
    """Return a JSON-like value without what differs from run to run: times and speeds."""
    if isinstance(value, list):
        return [_lasting(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    kept = {k: v for k, v in value.items() if k not in _NOT_COMPARED and not k.endswith("_per_s")}
    return {k: _lasting(v) for k, v in kept.items()}


def contents(run: Path) -> dict[str, bytes]:
    """Return what a run folder holds; the order of a journal's lines is that of threads and means nothing."""
    found: dict[str, bytes] = {}
    for path in sorted(p for p in run.rglob("*") if p.is_file()):
        data = path.read_bytes()
        if path.name in ("journal.jsonl", "answers.jsonl"):
            data = b"\n".join(sorted(data.split(b"\n")))
        if path.name in ("stage.json", "report.json"):
            data = json.dumps(_lasting(json.loads(data)), sort_keys=True).encode()
        if path.name in ("README.md", "report.html"):
            data = re.sub(rb"[0-9.,]+(?= tokens/s with| without \()", b"", data)  # speeds, measured anew
        if path.name == "status.json":  # what the command was doing, and when
            continue
        found[str(path.relative_to(run))] = data
    return found
