"""Between an engine and a store: states are checked as they come and whole shards written behind its back."""

import functools
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from eyas.errors import ContractError, EyasError
from eyas.row_figures import NORM, measure_rows
from eyas.stages.last_check import LastCheck
from eyas.stages.statistics import LayerSums, figures_of
from eyas.store.journal import ShardRecord
from eyas.threads import tensor_pool
from eyas.types import Failure, HiddenStates, TokenizedSample

Checked = tuple[LayerSums, LayerSums]  # aux, last
Floats = npt.NDArray[np.float32]
Check = Callable[[HiddenStates, TokenizedSample], Checked]

_NUM_CHECKERS = min(3, os.cpu_count() or 1)  # more would wait for the interpreter, not for memory
_NUM_WRITERS = 6
# Of many rows that an engine has measured every so many-th is measured again, up to rounding.
_AGAIN = 16
_ROUNDING = 1e-4


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
    checks: list[Future[Checked]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.seen) == len(self.wanted)


class Shelf:
    """Takes each sample's states once, in any order, and writes a shard when its last sample has come.

    What is expected is what went through ``feed`` to the engine.

    What waits to be checked and written takes at most ``_NUM_WRITERS`` times the memory of the largest
    shard; beyond that ``put`` blocks, and the engine with it. ``blocked_s`` says how long, to see who waits
    for whom.
    """

    def __init__(self, writer: Writer, check: Check, max_failures: int) -> None:
        self.writer, self.check, self.max_failures = writer, check, max_failures
        self.failures: list[Failure] = []
        self.blocked_s = 0.0
        self.written_bytes = 0
        self.written: queue.SimpleQueue[ShardRecord] = queue.SimpleQueue()  # for those who wait for shards
        self._shards: dict[int, _Shard] = {}
        self._shard_of: dict[str, int] = {}
        self._num_feeding = 0
        self._checkers = tensor_pool(_NUM_CHECKERS, "eyas-check")
        self._writers = tensor_pool(_NUM_WRITERS, "eyas-write")
        self._room = threading.Condition()
        self._waiting_bytes = self._largest_bytes = 0
        self._writes: list[Future[None]] = []

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
            shard.checks.append(self._checkers.submit(self.check, item, shard.wanted[sample_id]))
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

    def close(self) -> None:
        """Stop the threads; shards already handed to them are still written."""
        self._writers.shutdown()
        self._checkers.shutdown(cancel_futures=True)

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
        self.written.put(record)

    def _check_failures(self) -> None:
        if len(self.failures) > self.max_failures:
            first = self.failures[0]
            raise EyasError(
                f"{len(self.failures)} samples failed, more than extract.max_failures={self.max_failures}; "
                f"first: {first.sample_id}: {first.reason}",
                hint="complete shards are kept; mend the cause and run the same command again",
            )


def check_states(
    states: HiddenStates,
    sample: TokenizedSample,
    outside: Callable[[torch.Tensor], int | None],
    last_check: LastCheck | None = None,
) -> Checked:
    """Refuse states that cannot be this sample's, and return their figures.

    ``outside`` names, given row norms, the first layer of a magnitude that the probe never saw.
    Raises: ContractError for other tokens than those sent, values that are not finite, a layer that is
    all zero, a copy of another one or far from the probe's magnitude, a row that is zero or repeated, and
    last states that ``last_check`` refuses.
    """
    if not (states.sample.input_ids == sample.input_ids).all():
        raise ContractError(f"sample {sample.sample_id}: the engine echoed other token ids than it was sent")
    rows = _figures_of(states)
    width = states.last.shape[1]
    sums = LayerSums.of(rows.aux, width), LayerSums.of(rows.last[:, None], width)
    for name, part in zip(("aux", "last"), sums, strict=True):
        if not (np.isfinite(part.low) & np.isfinite(part.high)).all():
            raise ContractError(f"sample {sample.sample_id}: {name} states are not finite")
        empty = (part.low == 0) & (part.high == 0)
        if empty.any():
            raise ContractError(
                f"sample {sample.sample_id}: {name} layer number {int(empty.nonzero()[0][0])} is all zero"
            )
    norms = rows.aux[..., NORM]
    _check_rows(states, norms)
    if last_check is not None:
        last_check(states, norms, rows.last[:, NORM])
    layer = outside(torch.from_numpy(norms))
    if layer is not None:
        raise ContractError(
            f"sample {sample.sample_id}: aux layer number {layer} has another magnitude than any probe sample"
        )
    return sums


class _Figures(NamedTuple):
    """Of aux [T, A, 4] and last [R, 4]."""

    aux: Floats
    last: Floats


def _figures_of(states: HiddenStates) -> _Figures:
    """Return what the engine measured, after measuring some rows again, or measure all of them here."""
    if states.figures is None:
        return _Figures(measure_rows(states.aux).numpy(), measure_rows(states.last[:, None])[:, 0].numpy())
    for part, figures in zip((states.aux, states.last[:, None]), states.figures, strict=True):
        places = _measured_again(len(part))
        again = measure_rows(part[places]).numpy()
        given = figures.view(len(part), -1, 4)[places].numpy()
        with np.errstate(invalid="ignore"):  # infinities are for another check to refuse
            # Least and largest values are exact; sums come from another order.
            rounding = _ROUNDING * again[..., NORM:] * [0, 0, math.sqrt(part.shape[-1]), 1]
            close = np.abs(again - given) <= rounding
        if not (close | (again == given) | (np.isnan(again) & np.isnan(given))).all():
            raise ContractError(
                f"sample {states.sample.sample_id}: these are not the states that the engine measured",
                hint="they were changed between its memory and here: run the same command again",
            )
    return _Figures(*(figures.numpy() for figures in states.figures))


def _measured_again(num_rows: int) -> torch.Tensor:
    """Return the rows that are measured again: every so many-th and the last, of a few rows all."""
    if num_rows <= 4 * _AGAIN:
        return torch.arange(num_rows)
    return torch.cat([torch.arange(0, num_rows, _AGAIN), torch.tensor([num_rows - 1])])


def _check_rows(states: HiddenStates, norms_TL: Floats) -> None:
    """Refuse copied layers, rows that were never filled, and rows of another token."""
    sample = states.sample
    num_layers = norms_TL.shape[1]
    for a in range(num_layers):
        for b in range(a):
            same_norms = len(sample) > 1 and np.array_equal(norms_TL[:, a], norms_TL[:, b])
            if same_norms and torch.equal(states.aux[:, a], states.aux[:, b]):
                raise ContractError(
                    f"sample {sample.sample_id}: aux layers number {b} and {a} hold the same states"
                )
    empty = (norms_TL == 0).all(1)
    if empty.any():
        raise ContractError(f"sample {sample.sample_id}: row {int(empty.nonzero()[0][0])} is all zero")
    # Equal tokens may well have equal states, where nothing but they came before.
    differ = sample.input_ids[1:] != sample.input_ids[:-1]
    same = (norms_TL[1:] == norms_TL[:-1]).all(1) & differ
    for row in same.nonzero()[0].tolist():
        if torch.equal(states.aux[row], states.aux[row + 1]):
            raise ContractError(
                f"sample {sample.sample_id}: rows {row} and {row + 1} of different tokens are the same",
                hint="the engine repeated a row, or returned rows of another batch",
            )
