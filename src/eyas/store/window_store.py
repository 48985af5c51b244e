"""Hidden states that exist only while training needs them: captured a window at a time, never stored."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from eyas.errors import ContractError
from eyas.types import HiddenStates, TargetSpec, TokenizedSample

Group = Sequence[int]  # the samples of one batch, by index
Shares = Sequence[Sequence[Group]]  # the batches of one step, by rank


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
    also told the window's number. Engine and trainer take turns: a window, which is whole steps, is captured,
    trained on and forgotten before the next one. Of several ranks each captures its own share of a window.
    """

    def __init__(
        self,
        spec: TargetSpec,
        samples: Sequence[TokenizedSample],
        capture: Callable[[Sequence[TokenizedSample], int], Sequence[HiddenStates]],
        fingerprint: str,
    ) -> None:
        self.spec, self.fingerprint = spec, fingerprint
        self.turns = Turns()
        self.bounds: Sequence[tuple[int, int]] = ()
        self._samples, self._capture = samples, capture
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

    def plan(self, steps: Sequence[Shares], window_bytes: int) -> Sequence[tuple[int, int]]:
        """Decide, from all the steps and all the ranks' shares of them, where windows start and end.

        Units: a rank's share of a window has at most ``window_bytes`` of states, or is one step.
        """
        self.bounds = plan_windows(steps, [bytes_of(s, self.spec) for s in self._samples], window_bytes)
        return self.bounds

    def windows(self, steps: Sequence[Sequence[Group]], first: int, last: int) -> Iterator[list[Group]]:
        """Yield the micro-batches of ``steps[first:last]``, this rank's, in runs; the samples of a run can be
        read until the next is asked for.

        Where windows begin does not follow from ``first``: one that training was interrupted in is captured
        whole again, in the same batches of the engine, and so to the same bits.
        """
        for number, (start, end) in enumerate(self.bounds):
            left = list(chain.from_iterable(steps[max(start, first) : min(end, last)]))
            if not left:
                continue
            began = time.monotonic()
            self._hold(list(chain.from_iterable(steps[start:end])), number)
            handed_over = time.monotonic()
            self.turns.waited_s += handed_over - began
            try:
                yield left
            finally:
                self._held = {}
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()  # the trainer's turn ends with its last kernel
                self.turns.trainer_s += time.monotonic() - handed_over

    def _hold(self, groups: Sequence[Group], number: int) -> None:
        samples = [self._samples[i] for group in groups for i in group]
        self._held = {states.sample.sample_id: states for states in self._capture(samples, number)}
        held = sum(s.aux.nbytes + s.last.nbytes for s in self._held.values())
        self.turns.num_windows += 1
        self.turns.num_tokens += sum(len(s) for s in samples)
        self.turns.peak_bytes = max(self.turns.peak_bytes, held)


def bytes_of(sample: TokenizedSample, spec: TargetSpec) -> int:
    """Return the bytes of a sample's states."""
    rows = len(sample) * spec.num_aux_layers + int(sample.supervised.sum())
    itemsize: int = getattr(torch, spec.dtype).itemsize
    return rows * spec.hidden_size * itemsize


def plan_windows(steps: Sequence[Shares], sizes: Sequence[int], window_bytes: int) -> list[tuple[int, int]]:
    """Return where windows of steps start and end: no rank's share above ``window_bytes``, and of one epoch.

    An epoch ends where a sample comes again.

    A step of which some rank's share is larger than that is a window of its own.
    """
    bounds, seen, held = [0], set[int](), list[int]()
    for number, shares in enumerate(steps):
        coming = [sum(sizes[i] for group in share for i in group) for share in shares]
        samples = {i for share in shares for group in share for i in group}
        together = [a + b for a, b in zip(held or [0] * len(coming), coming, strict=True)]
        is_new_epoch = not seen.isdisjoint(samples)
        if is_new_epoch or (number > bounds[-1] and max(together) > window_bytes):
            bounds.append(number)
            together = coming
        if is_new_epoch:
            seen = set()
        seen |= samples
        held = together
    return list(zip(bounds, [*bounds[1:], len(steps)], strict=True)) if steps else []


def owned(states: HiddenStates, spec: TargetSpec) -> HiddenStates:
    """Return states in the target's type, and without what a view keeps in memory beside them."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    aux, last = (
        x.clone() if x.untyped_storage().nbytes() > x.nbytes else x
        for x in (states.aux.to(dtype), states.last.to(dtype))
    )
    figures = None
    if states.figures is not None and states.aux.dtype == dtype:  # rounded states have others
        figures = states.figures[0].clone(), states.figures[1].clone()
    return HiddenStates(states.sample, aux, last, figures)
