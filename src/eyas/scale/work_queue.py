"""Units of work handed out in chunks: large ones first, so that engines stay full, small ones at the end."""

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from eyas.errors import EyasError

_MOST_AT_ONCE = 64
# A unit in whose company so many workers died is likely what kills them.
_MAX_ATTEMPTS = 3


class WorkQueue:
    """Every unit is taken by one worker at a time until some worker has done it."""

    def __init__(self, units: Iterable[Any], num_workers: int, ahead: int | None = None) -> None:
        """With ``ahead``, units go out singly and in order, and so many of them may be out or done while
        nobody has made room for more."""
        self._room = ahead
        self._waiting = deque(units)
        self._num_workers = num_workers
        self._open = len(self._waiting)  # waiting, or with a worker
        self._attempts: Counter[Any] = Counter()
        self._changed = threading.Condition()
        self._stopped = False

    def take(self) -> list[Any]:
        """Return some units, waiting for ones that come back; none once all are done, or after ``stop``."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over or (self._waiting and self._room != 0))
            if self.is_over:
                return []
            share = len(self._waiting) // (2 * self._num_workers)
            if self._room is not None:
                self._room -= 1
                return [self._waiting.popleft()]
            # What has come back goes out alone, so that it takes nothing else along if it was the cause.
            suspect = self._attempts[self._waiting[0]] > 0
            number = 1 if suspect else min(max(1, share), _MOST_AT_ONCE)
            return [self._waiting.popleft() for _ in range(number)]

    def make_room(self) -> None:
        """Let one unit more go out."""
        with self._changed:
            assert self._room is not None
            self._room += 1
            self._changed.notify_all()

    def done(self, unit: Any) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def give_back(self, units: Sequence[Any]) -> None:
        """Raises: EyasError when a unit has come back too often."""
        with self._changed:
            self._waiting.extendleft(reversed(units))
            self._attempts.update(units)
            if self._room is not None:
                self._room += len(units)
            self._changed.notify_all()
        for unit in units:
            if self._attempts[unit] >= _MAX_ATTEMPTS:
                raise EyasError(
                    f"{_MAX_ATTEMPTS} workers died with {unit}",
                    hint="look at the samples in it and at the machine's memory; what is done is kept",
                )

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        return self._stopped or not self._open
