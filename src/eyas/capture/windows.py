"""A stream's units of work: which samples one engine captures together for one rank, and their states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from eyas.store.journal import ShardRecord
from eyas.types import Failure, HiddenStates, TokenizedSample


class Unit(NamedTuple):
    """A rank's share of a window, which one engine captures: the samples, by index."""

    window: int
    rank: int
    samples: tuple[int, ...]

    def __str__(self) -> str:
        return f"window {self.window} of rank {self.rank}"


@dataclass
class Window:
    """The states of one unit; what a CheckedShardWriter writes to instead of a store."""

    states: Sequence[HiddenStates] = ()
    figures: Mapping[str, Any] | None = None

    def write(
        self,
        shard: int,
        states: Sequence[HiddenStates],
        failures: Sequence[Failure] = (),
        figures: Mapping[str, Any] | None = None,
    ) -> ShardRecord:
        self.states, self.figures = states, figures
        size = sum(s.aux.nbytes + s.last.nbytes for s in states)
        return ShardRecord(shard, len(states), sum(len(s.sample) for s in states), size, checksum="")


class WindowSource(Protocol):
    """What captures this rank's share of windows: an engine here, or several elsewhere."""

    busy_s: float  # seconds that engines worked for this rank
    # Whether it uses the trainer's device, so that it is closed as soon as it is not needed.
    shares_device: bool

    def begin(self, units: Sequence[Unit]) -> None:
        """Be told what all ranks will ask for, each its own and in this order."""
        ...

    def capture(self, unit: Unit, samples: Sequence[TokenizedSample]) -> Window: ...

    def close(self) -> None: ...
