"""When requests are sent: as many as are to be in flight (closed loop), or at given times (open loop)."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from eyas.engines.base import Prompt

# A prompt, and the time from which its latency counts, in seconds after the start.
Due = tuple[Prompt, float]


@dataclass
class ClosedLoop:
    """Keeps ``concurrency`` requests in flight; each is sent when it can be."""

    prompts: Sequence[Prompt]
    concurrency: int
    _waiting: Iterator[Prompt] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = iter(self.prompts)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    def due(self, now: float, num_open: int) -> list[Due]:
        """Return the requests to be sent now."""
        return [(prompt, now) for prompt in itertools.islice(self._waiting, self.concurrency - num_open)]

    def wait(self, now: float) -> float:
        """Return how long nothing is due while no request is open."""
        return 0.0


@dataclass
class OpenLoop:
    """Sends each request at its arrival, ascending ``arrivals_s``, however many are open."""

    prompts: Sequence[Prompt]
    arrivals_s: Sequence[float]
    _num_sent: int = 0

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    def due(self, now: float, num_open: int) -> list[Due]:
        """Return the requests that have arrived since they were last asked for."""
        found = []
        while self._num_sent < len(self.prompts) and self.arrivals_s[self._num_sent] <= now:
            found.append((self.prompts[self._num_sent], self.arrivals_s[self._num_sent]))
            self._num_sent += 1
        return found

    def wait(self, now: float) -> float:
        """Return how long nothing is due while no request is open."""
        return max(0.0, self.arrivals_s[self._num_sent] - now)
