"""Progress that tells the truth: how much is done, how fast, how long it takes, and where that is shown.

Used as a library, eyas shows nothing: ``say`` writes to the logger "eyas", and progress goes to the screen
that ``on_screen`` set, if any. The command line sets one (``eyas.console.shown``).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

LOGGER = logging.getLogger("eyas")
LOGGER.addHandler(logging.NullHandler())


class Progress:
    """Count work done out of ``total`` (None: unknown) and show rate and time left.

    A terminal is refreshed a few times a second; elsewhere a plain line appears every ``plain_every_s``
    seconds, so that a log file stays readable.
    """

    def __init__(self, label: str, total: int | None, unit: str, plain_every_s: float = 10.0) -> None:
        from rich.progress import Progress as Estimate  # too slow to import for eyas --help

        self.label, self.total, self.unit = label, total, unit
        self.note = ""
        self.plain_every_s = plain_every_s
        self._screen = current_screen()
        self._every_s = self._screen.every_s or plain_every_s
        self._started = self._printed = time.monotonic()
        # rich estimates the rate; what it would draw is left to the screen.
        self._estimate = Estimate(disable=True, get_time=time.monotonic)
        self._task_id = self._estimate.add_task(label, total=total)

    def __enter__(self) -> Progress:
        self._screen.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._screen.show(self, final=True)

    def advance(self, amount: int, note: str = "") -> None:
        """Add ``amount`` units of work; ``note`` is shown behind the figures."""
        self._estimate.update(self._task_id, advance=amount)
        self.note = note
        if time.monotonic() - self._printed >= self._every_s:
            self._printed = time.monotonic()
            self._screen.show(self, final=False)

    @property
    def done(self) -> int:
        return int(self._estimate.tasks[0].completed)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def rate(self) -> float | None:
        """Units per second over the last half minute, or since the start; None before anything is done."""
        if not self.done:
            return None
        return self._estimate.tasks[0].speed or self._mean_rate

    @property
    def left_s(self) -> float | None:
        """Seconds left at this rate; None while nothing is known."""
        rate = self.rate
        return None if rate is None or self.total is None else max(0, self.total - self.done) / rate

    def counts_text(self) -> str:
        """Return what is done of what."""
        of = "" if self.total is None else f"/{self.total:,}"
        return f"{self.label}: {self.done:,}{of}"

    def rate_text(self, final: bool = False) -> str:
        """Return the rate with its unit, at the end of all work, or that it is only starting."""
        rate = self._mean_rate if final else self.rate
        if not rate:
            return "starting"
        return f"{rate:,.{1 if rate < 20 else 0}f} {self.unit}/s"

    def text(self, final: bool = False) -> str:
        """Return the line that says it all."""
        parts = [f"{self.counts_text()} {self.unit}"]
        if self.done or not final:
            parts.append(self.rate_text(final))
        if final:
            parts.append(f"{self.elapsed_s:.0f} s")
        elif (left := self.left_s) is not None:
            parts.append(f"{left:.0f} s left")
        if self.note:
            parts.append(self.note)
        return ", ".join(parts)

    @property
    def _mean_rate(self) -> float:
        return self.done / max(self.elapsed_s, 1e-9)


class Screen:
    """Plain lines on stderr; the other screens are in ``progress_displays`` and ``progress_terminal``."""

    every_s: float | None = None  # seconds between two looks at progress; None: the progress's own

    def say(self, text: str) -> None:
        """Show one line for a person."""
        print(text, file=sys.stderr, flush=True)

    def begin(self, progress: Progress) -> None:
        """Note that work starts, of which nothing is done yet; a log needs no such note."""

    def show(self, progress: Progress, final: bool) -> None:
        self.say(progress.text(final))

    def stage(self, name: str, state: str, seconds: float = 0.0) -> None:
        """Note that a stage of ``eyas run`` is running, done, kept or failed; lines need no such note."""


class _Silence(Screen):
    def say(self, text: str) -> None:
        pass


_screens: list[Screen] = []


def current_screen() -> Screen:
    """Return the screen that ``on_screen`` set last, or one that shows nothing."""
    return _screens[-1] if _screens else _Silence()


@contextmanager
def on_screen(screen: Screen) -> Iterator[Screen]:
    """Show progress on ``screen`` inside the block, and in a command also what is said."""
    _screens.append(screen)
    try:
        yield screen
    finally:
        _screens.remove(screen)


def mute() -> None:
    """Show nothing from here on: one of several processes that do the same speaks for all."""
    _screens.append(_Silence())


def say(text: str) -> None:
    """Tell a person one line, through the logger "eyas"; a record names the module that said it."""
    LOGGER.info("%s", text, stacklevel=2)
