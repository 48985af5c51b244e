"""Screens for other programs: JSON lines, and the file of ``eyas status``."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from eyas.progress import Progress, Screen

_STATUS_EVERY_S = 1.0


class Forwarding(Screen):
    """Does what the screen behind it does; the ground of those that add something."""

    def __init__(self, behind: Screen) -> None:
        self.behind = behind
        self.every_s = behind.every_s

    def say(self, text: str) -> None:
        self.behind.say(text)

    def begin(self, progress: Progress) -> None:
        self.behind.begin(progress)

    def show(self, progress: Progress, final: bool) -> None:
        self.behind.show(progress, final)

    def stage(self, name: str, state: str, seconds: float = 0.0) -> None:
        self.behind.stage(name, state, seconds)


class StatusFile(Forwarding):
    """Also keeps ``path`` at what is being done now, so that another process can tell."""

    def __init__(self, behind: Screen, path: Path) -> None:
        super().__init__(behind)
        self.every_s = min(behind.every_s or _STATUS_EVERY_S, _STATUS_EVERY_S)
        self.path = path
        self._behind_every_s = behind.every_s
        self._plain_shown = time.monotonic()
        self._value: dict[str, Any] = {"stages": {}}

    def begin(self, progress: Progress) -> None:
        self._note(progress, final=False)
        self.behind.begin(progress)

    def show(self, progress: Progress, final: bool) -> None:
        self._note(progress, final)
        # The file wants to know each second; a log wants a line now and then.
        if final or self._behind_every_s or time.monotonic() - self._plain_shown >= progress.plain_every_s:
            self._plain_shown = time.monotonic()
            self.behind.show(progress, final)

    def stage(self, name: str, state: str, seconds: float = 0.0) -> None:
        self._value["stages"][name] = {"state": state, "seconds": round(seconds, 1)}
        self._write()
        self.behind.stage(name, state, seconds)

    def _note(self, progress: Progress, final: bool) -> None:
        self._value |= {"progress": progress_facts(progress), "text": progress.text(final)}
        self._write()

    def _write(self) -> None:
        beside = self.path.with_name(f"{self.path.name}.new")
        beside.write_text(json.dumps(self._value | {"time": time.time()}), encoding="utf-8")
        beside.replace(self.path)  # seen whole or not at all; need not survive a crash of the machine


class JsonLines(Screen):
    """One JSON object a line on stdout: ``event`` is message, progress, stage, result or error."""

    def say(self, text: str) -> None:
        self.event("message", text=text)

    def show(self, progress: Progress, final: bool) -> None:
        self.event("progress", final=final, **progress_facts(progress))

    def stage(self, name: str, state: str, seconds: float = 0.0) -> None:
        self.event("stage", stage=name, state=state, seconds=round(seconds, 3))

    def event(self, kind: str, **facts: Any) -> None:
        print(
            json.dumps({"event": kind, "time": round(time.time(), 3), **facts}, ensure_ascii=False),
            flush=True,
        )


def progress_facts(progress: Progress) -> dict[str, Any]:
    """Return a progress as JSON-like values, memory in bytes; ``rate`` is None before anything is done."""
    left, rate = progress.left_s, progress.rate
    return {
        "label": progress.label,
        "done": progress.done,
        "total": progress.total,
        "unit": progress.unit,
        "rate": None if rate is None else round(rate, 3),
        "elapsed_s": round(progress.elapsed_s, 1),
        "left_s": None if left is None else round(left, 1),
        "note": progress.note,
        **{f"{name}_bytes": size for name, size in memory().items()},
    }


def memory() -> dict[str, int]:
    """Return this process's memory, and a GPU's that torch uses, in bytes."""
    import psutil

    found = {"memory": int(psutil.Process().memory_info().rss)}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        found["gpu_memory"] = total - free
    return found


def memory_text() -> str:
    return ", ".join(f"{size / 2**30:.1f} GiB {name.replace('_', ' ')}" for name, size in memory().items())


def duration(seconds: float) -> str:
    """Return a time as a person says it: 45 s, 12 min, 3 h 20 min, 2 d 4 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def size(num_bytes: float) -> str:
    """Return bytes as a person says them: 57.3 KB, 1.2 GB, 33 TB (powers of ten, as disks are sold)."""
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"
