"""Progress that tells the truth: how much is done, how fast, how long it takes, and where that is shown."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class Progress:
    """Count work done out of ``total`` (None: unknown) and show rate and time left.

    On a terminal one line is rewritten a few times a second; elsewhere a plain line appears every
    ``plain_every_s`` seconds, so that a log file stays readable.
    """

    def __init__(self, label: str, total: int | None, unit: str, plain_every_s: float = 10.0) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self.note = ""
        self.plain_every_s = plain_every_s
        self._screen = current_screen()
        self._every_s = self._screen.every_s or plain_every_s
        self._started = self._printed = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._screen.show(self, final=True)

    def advance(self, amount: int, note: str = "") -> None:
        """Add ``amount`` units of work; ``note`` is shown behind the figures."""
        self.done += amount
        self.note = note
        if time.monotonic() - self._printed >= self._every_s:
            self._printed = time.monotonic()
            self._screen.show(self, final=False)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def rate(self) -> float:
        """Units per second since the start."""
        return self.done / max(self.elapsed_s, 1e-9)

    @property
    def left_s(self) -> float | None:
        """Seconds left at this rate; None while nothing is known."""
        return (self.total - self.done) / self.rate if self.done and self.total is not None else None

    def text(self, final: bool = False) -> str:
        """Return the line that says it all."""
        digits = 1 if self.rate < 20 else 0
        of = "" if self.total is None else f"/{self.total:,}"
        parts = [f"{self.label}: {self.done:,}{of} {self.unit}", f"{self.rate:,.{digits}f} {self.unit}/s"]
        if final:
            parts.append(f"{self.elapsed_s:.0f} s")
        elif (left := self.left_s) is not None:
            parts.append(f"{left:.0f} s left")
        if self.note:
            parts.append(self.note)
        return ", ".join(parts)


class Screen:
    """Plain lines on stderr. Other screens are in ``eyas.progress_displays``."""

    every_s: float | None = None  # seconds between two looks at progress; None: the progress's own

    def say(self, text: str) -> None:
        """Show one line for a person."""
        print(text, file=sys.stderr, flush=True)

    def show(self, progress: Progress, final: bool) -> None:
        self.say(progress.text(final))

    def stage(self, name: str, state: str, seconds: float = 0.0) -> None:
        """Note that a stage of ``eyas run`` is running, done, kept or failed; lines need no such note."""


class _LiveLine(Screen):
    """One line of a terminal, rewritten."""

    every_s = 0.2

    def show(self, progress: Progress, final: bool) -> None:
        sys.stderr.write(f"\r\x1b[K{progress.text(final)}" + ("\n" if final else ""))
        sys.stderr.flush()


_screens: list[Screen] = []


def current_screen() -> Screen:
    """Return the screen in use: the one that ``on_screen`` set, else what stderr allows."""
    if _screens:
        return _screens[-1]
    return _LiveLine() if sys.stderr.isatty() else Screen()


@contextmanager
def on_screen(screen: Screen) -> Iterator[Screen]:
    """Show progress and words on ``screen`` inside the block."""
    _screens.append(screen)
    try:
        yield screen
    finally:
        _screens.remove(screen)


class _Silence(Screen):
    def say(self, text: str) -> None:
        pass


def mute() -> None:
    """Show nothing from here on: one of several processes that do the same speaks for all."""
    _screens.append(_Silence())


def say(text: str) -> None:
    """Show one line for a person."""
    current_screen().say(text)
