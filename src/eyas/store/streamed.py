"""Hidden states that exist only while training needs them: captured a window at a time, never stored."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from eyas.errors import ContractError
from eyas.types import HiddenStates, TargetSpec, TokenizedSample

Group = Sequence[int]  # the samples of one batch, by index


@dataclass
class Turns:
    """How long the trainer waited for windows and worked on them. Units: seconds."""

    waited_s: float = 0.0
    trainer_s: float = 0.0
    num_windows: int = 0
    num_tokens: int = 0
    peak_bytes: int = 0


class StreamedStates:
    """A StateReader whose states are captured in the order in which training reads them.

    ``capture`` returns the states of the samples it is given, ``owned``, all of them and in any order; it is
    also told the window's number. Engine and trainer take turns: a window of batches is captured, trained on
    and forgotten before the next one.
    Units: at most ``window_bytes`` of states exist at a time.
    """

    def __init__(
        self,
        spec: TargetSpec,
        samples: Sequence[TokenizedSample],
        capture: Callable[[Sequence[TokenizedSample], int], Sequence[HiddenStates]],
        window_bytes: int,
        fingerprint: str,
    ) -> None:
        self.spec, self.fingerprint = spec, fingerprint
        self.turns = Turns()
        self._samples, self._capture, self._window_bytes = samples, capture, window_bytes
        self._held: dict[str, HiddenStates] = {}

    @property
    def lengths(self) -> Sequence[int]:
        return [len(s) for s in self._samples]

    def sample(self, index: int) -> TokenizedSample:
        return self._samples[index]

    def read(self, index: int) -> HiddenStates:
        """Raises: ContractError for a sample outside the window that is being trained on."""
        sample_id = self._samples[index].sample_id
        if sample_id not in self._held:
            raise ContractError(f"sample {sample_id} was read outside its window")
        return self._held[sample_id]

    def windows(self, groups: Sequence[Group], first: int, last: int) -> Iterator[Sequence[Group]]:
        """Yield ``groups[first:last]`` in runs; the samples of a run can be read until the next is asked for.

        Where windows begin follows from all the groups and not from ``first``: one that training was
        interrupted in is captured whole again, in the same batches of the engine, and so to the same bits.
        """
        for number, (start, end) in enumerate(self.plan(groups)):
            if end <= first or start >= last:
                continue
            began = time.monotonic()
            self._hold(groups[start:end], number)
            handed_over = time.monotonic()
            self.turns.waited_s += handed_over - began
            try:
                yield groups[max(start, first) : min(end, last)]
            finally:
                self._held = {}
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()  # the trainer's turn ends with its last kernel
                self.turns.trainer_s += time.monotonic() - handed_over

    def plan(self, groups: Sequence[Group]) -> list[tuple[int, int]]:
        """Return where windows of ``groups`` start and end."""
        return plan_windows(groups, [self._bytes_of(s) for s in self._samples], self._window_bytes)

    def _hold(self, groups: Sequence[Group], number: int) -> None:
        samples = [self._samples[i] for group in groups for i in group]
        self._held = {states.sample.sample_id: states for states in self._capture(samples, number)}
        held = sum(s.aux.nbytes + s.last.nbytes for s in self._held.values())
        self.turns.num_windows += 1
        self.turns.num_tokens += sum(len(s) for s in samples)
        self.turns.peak_bytes = max(self.turns.peak_bytes, held)

    def _bytes_of(self, sample: TokenizedSample) -> int:
        rows = len(sample) * self.spec.num_aux_layers + int(sample.supervised.sum())
        itemsize: int = getattr(torch, self.spec.dtype).itemsize
        return rows * self.spec.hidden_size * itemsize


def plan_windows(groups: Sequence[Group], sizes: Sequence[int], window_bytes: int) -> list[tuple[int, int]]:
    """Return where windows of groups start and end: each of at most ``window_bytes``, and of one epoch.

    An epoch ends where a sample comes again.

    A group larger than that is a window of its own.
    """
    bounds, seen, size = [0], set[int](), 0
    for number, group in enumerate(groups):
        coming = sum(sizes[i] for i in group)
        is_new_epoch = not seen.isdisjoint(group)
        if is_new_epoch or (number > bounds[-1] and size + coming > window_bytes):
            bounds.append(number)
            size = 0
        if is_new_epoch:
            seen = set()
        seen.update(group)
        size += coming
    return list(zip(bounds, [*bounds[1:], len(groups)], strict=True)) if groups else []


def owned(states: HiddenStates, spec: TargetSpec) -> HiddenStates:
    """Return states in the target's type, and without what a view keeps in memory beside them."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    aux, last = (
        x.clone() if x.untyped_storage().nbytes() > x.nbytes else x
        for x in (states.aux.to(dtype), states.last.to(dtype))
    )
    return HiddenStates(states.sample, aux, last)
