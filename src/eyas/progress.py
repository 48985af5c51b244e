"""Progress that tells the truth: a live line on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType

_muted = False


def mute() -> None:
    """Print nothing from here on: one of several processes that do the same speaks for all."""
    global _muted
    _muted = True


class Progress:
    """Count work done out of ``total`` (None: unknown) and print rate and time left on stderr.

    On a terminal one line is rewritten a few times a second; elsewhere a plain line appears every
    ``plain_every_s`` seconds, so that a log file stays readable.
    """

    def __init__(self, label: str, total: int | None, unit: str, plain_every_s: float = 10.0) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self.note = ""
        self._live = sys.stderr.isatty()
        self._every_s = 0.2 if self._live else plain_every_s
        self._started = self._printed = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._print(final=True)

    def advance(self, amount: int, note: str = "") -> None:
        """Add ``amount`` units of work; ``note`` is shown behind the figures."""
        self.done += amount
        self.note = note
        if time.monotonic() - self._printed >= self._every_s:
            self._print()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def rate(self) -> float:
        """Units per second since the start."""
        return self.done / max(self.elapsed_s, 1e-9)

    def _print(self, final: bool = False) -> None:
        self._printed = time.monotonic()
        if _muted:
            return
        digits = 1 if self.rate < 20 else 0
        of = "" if self.total is None else f"/{self.total:,}"
        parts = [f"{self.label}: {self.done:,}{of} {self.unit}", f"{self.rate:,.{digits}f} {self.unit}/s"]
        if final:
            parts.append(f"{self.elapsed_s:.0f} s")
        elif self.done and self.total is not None:
            parts.append(f"{(self.total - self.done) / self.rate:.0f} s left")
        if self.note:
            parts.append(self.note)
        text = ", ".join(parts)
        if self._live:
            sys.stderr.write(f"\r\x1b[K{text}" + ("\n" if final else ""))
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()


def say(text: str) -> None:
    """Print one line for a person on stderr."""
    if not _muted:
        print(text, file=sys.stderr, flush=True)
