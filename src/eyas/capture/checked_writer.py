"""Between an engine and a store: states are checked as they come, whole shards written in the background."""

import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from eyas.capture.capture_checks import Checked
from eyas.capture.statistics import LayerSums, figures_of
from eyas.engines.base import Engine
from eyas.errors import ContractError, EyasError
from eyas.store.journal import ShardRecord
from eyas.tensor_pool import tensor_pool
from eyas.types import Failure, HiddenStates, TokenizedSample

Check = Callable[[Sequence[HiddenStates], Sequence[TokenizedSample]], Checked]

_NUM_CHECKERS = min(3, os.cpu_count() or 1)  # more would wait for the interpreter, not for memory
_NUM_WRITERS = 6
# Samples are checked together, of at least so many rows: each operation takes the interpreter's lock.
_CHECKED_ROWS = 2048


class Writer(Protocol):
    """Takes a whole shard at once, checked: a ShardWriter, or memory."""

    def write(
        self,
        shard: int,
        states: Sequence[HiddenStates],
        failures: Sequence[Failure] = (),
        figures: Mapping[str, Any] | None = None,
    ) -> ShardRecord: ...


@dataclass
class _Shard:
    """A shard that is not complete yet."""

    wanted: dict[str, TokenizedSample]
    seen: set[str] = field(default_factory=set)
    states: dict[str, HiddenStates] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    unchecked: list[HiddenStates] = field(default_factory=list)
    checks: list[Future[Checked]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.seen) == len(self.wanted)


def capture_into(
    writer: "CheckedShardWriter",
    engine: Engine,
    shards: Iterable[tuple[int, Sequence[TokenizedSample]]],
    own: Callable[[HiddenStates], HiddenStates] = lambda states: states,
) -> Iterator[HiddenStates | Failure]:
    """Capture numbered shards with ``engine``; yield each item once ``writer`` has taken it.

    ``own`` is applied to states before they are kept, where they may share memory with the engine's. When
    the last item has been yielded, all shards are written.
    Raises: as ``CheckedShardWriter.put`` and ``finish``.
    """
    # An engine that does not stream holds all it is given, so it is given one shard at a time.
    for together in [shards] if engine.streams else ([shard] for shard in shards):
        for item in engine.capture(writer.feed(together)):
            writer.put(item if isinstance(item, Failure) else own(item))
            yield item
    writer.finish()


class CheckedShardWriter:
    """Takes each sample's states once, in any order, and writes a shard when its last sample has come.

    What is expected is what went through ``feed`` to the engine; ``capture_into`` does both.

    What waits to be checked and written takes at most ``_NUM_WRITERS`` times the memory of the largest
    shard; beyond that ``put`` blocks, and the engine with it. ``blocked_s`` says how long, to see who waits
    for whom.
    """

    def __init__(self, writer: Writer, check: Check, max_failures: int) -> None:
        self.writer, self.check, self.max_failures = writer, check, max_failures
        self.failures: list[Failure] = []
        self.blocked_s = 0.0
        self.written_bytes = 0
        self._written: queue.SimpleQueue[ShardRecord] = queue.SimpleQueue()
        self._shards: dict[int, _Shard] = {}
        self._shard_of: dict[str, int] = {}
        self._num_feeding = 0
        self._checkers = tensor_pool(_NUM_CHECKERS, "eyas-check")
        self._writers = tensor_pool(_NUM_WRITERS, "eyas-write")
        self._room = threading.Condition()
        self._waiting_bytes = self._largest_bytes = 0
        self._writes: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def feed(self, parts: Iterable[tuple[int, Sequence[TokenizedSample]]]) -> Iterator[TokenizedSample]:
        """Yield the samples of numbered shards, and expect the states of those that were taken."""
        self._num_feeding += 1
        for number, samples in parts:
            self._shards[number] = _Shard({s.sample_id: s for s in samples})
            self._shard_of.update((s.sample_id, number) for s in samples)
            yield from samples
        self._num_feeding -= 1

    def put(self, item: HiddenStates | Failure) -> None:
        """Raises: what a check or a write in the background raised; ContractError for a wrong item."""
        sample_id = item.sample_id if isinstance(item, Failure) else item.sample.sample_id
        number = self._shard_of.get(sample_id)
        if number is None or sample_id in self._shards[number].seen:
            raise ContractError(f"the engine returned sample {sample_id} twice or unasked")
        shard = self._shards[number]
        shard.seen.add(sample_id)
        if isinstance(item, Failure):
            shard.failures.append(item)
            self.failures.append(item)
            self._check_failures()
        else:
            shard.states[sample_id] = item
            shard.unchecked.append(item)
        self._check_together(shard)
        if shard.is_complete:
            for done in shard.wanted:
                del self._shard_of[done]
            self._write(number, self._shards.pop(number))
        for write in [w for w in self._writes if w.done()]:
            self._writes.remove(write)
            write.result()

    def finish(self) -> None:
        """Wait until everything is on disk. Raises: as ``put``; ContractError when samples are missing."""
        for write in self._writes:
            write.result()
        lost = [s for shard in self._shards.values() for s in shard.wanted if s not in shard.seen]
        if lost:
            raise ContractError(f"the engine lost {len(lost)} samples, such as {min(lost)}")
        if self._num_feeding:
            raise ContractError("the engine stopped before it had taken all samples")

    def drain(self) -> Iterator[ShardRecord]:
        """Yield the records of the shards that were written since the last call."""
        while not self._written.empty():
            yield self._written.get()

    def close(self) -> None:
        """Stop the threads; shards already handed to them are still written."""
        self._writers.shutdown()
        self._checkers.shutdown(cancel_futures=True)

    def _check_together(self, shard: _Shard) -> None:
        """Have states checked behind the engine's back, when there are enough or no more will come."""
        together = shard.unchecked
        if together and (shard.is_complete or sum(len(s.sample) for s in together) >= _CHECKED_ROWS):
            wanted = [shard.wanted[s.sample.sample_id] for s in together]
            shard.checks.append(self._checkers.submit(self.check, together, wanted))
            shard.unchecked = []

    def _write(self, number: int, shard: _Shard) -> None:
        size = sum(s.aux.nbytes + s.last.nbytes for s in shard.states.values())
        self._largest_bytes = max(self._largest_bytes, size)
        started = time.monotonic()
        with self._room:
            self._room.wait_for(lambda: self._waiting_bytes + size <= _NUM_WRITERS * self._largest_bytes)
            self._waiting_bytes += size
        self.blocked_s += time.monotonic() - started
        future = self._writers.submit(self._write_checked, number, shard)
        future.add_done_callback(lambda _: self._make_room(size))
        self._writes.append(future)

    def _make_room(self, size: int) -> None:
        with self._room:
            self._waiting_bytes -= size
            self._room.notify()

    def _write_checked(self, number: int, shard: _Shard) -> None:
        checked = [c.result() for c in shard.checks]
        states = [shard.states[s] for s in shard.wanted if s in shard.states]
        figures = None
        if checked:
            aux = functools.reduce(LayerSums.__add__, (a for a, _ in checked))
            last = functools.reduce(LayerSums.__add__, (b for _, b in checked))
            figures = figures_of(aux, last)
        record = self.writer.write(number, states, shard.failures, figures)
        self.written_bytes += record.num_bytes
        self._written.put(record)

    def _check_failures(self) -> None:
        if len(self.failures) > self.max_failures:
            first = self.failures[0]
            raise EyasError(
                f"{len(self.failures)} samples failed, more than extract.max_failures={self.max_failures}; "
                f"first: {first.sample_id}: {first.reason}",
                hint="complete shards are kept; mend the cause and run the same command again",
            )
