"""Whether last states are the sample's own: what the teacher makes of them, without its full head.

States of another request, or shifted by a row, have the right shape and magnitude. What they do not do is
prefer the token that really follows to another token of the same answer. How often the target's own
states do is measured on samples computed alone; a sample that does much worse is refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from eyas.capture.states_batch import Bools, Floats, StatesBatch, all_within
from eyas.errors import ContractError
from eyas.row_stats import NORM
from eyas.targets.teacher import TeacherHead
from eyas.types import HiddenStates, TargetSpec

# Samples computed alone to know what is usual, each of so many rows at least.
NUM_CALIBRATING = 16
_MIN_CALIBRATING_ROWS = 16
# Answers that are the target's own: a row misses when any other token of the answer is preferred.
# Answers by others: it misses when one certain other token is, which of another's states every second does.
# (against all others, most misses of any sample that calibrates, least share that is taken for usual)
_WAYS = ((True, 0.02, 0.02), (False, 0.125, 0.25))
# Rows judged of one sample. A quarter of rows that are not its own shows in 96 the first way; the second way
# needs more to tell that half of them miss.
_MAX_ROWS = {True: 96, False: 256}
# A sample is refused when its misses have a chance of less than e^-21, one in a billion.
_IMPROBABLE = 21.0
# How far the root mean square of a normed row is from 1.
_NORMED = 0.02
_MIN_NORMED_ROWS = 4


@dataclass(frozen=True)
class FinalStateCheck:
    """``usual_misses`` is the share of rows expected to miss; None: tokens are not judged."""

    spec: TargetSpec
    teacher: TeacherHead
    usual_misses: float | None
    against_all: bool = False

    @classmethod
    def calibrated(
        cls, spec: TargetSpec, teacher: TeacherHead, known: Sequence[HiddenStates]
    ) -> "FinalStateCheck":
        """Measure on states that are known to be right."""
        for against_all, most, least in _WAYS:
            judged = count_misses(known, teacher, against_all) if known else []
            shares = [misses / rows for misses, rows in judged if rows >= _MIN_CALIBRATING_ROWS]
            if shares and max(shares) <= most:
                return cls(spec, teacher, max(least, 2 * max(shares)), against_all)
        return cls(spec, teacher, None)

    def __call__(self, batch: StatesBatch) -> None:
        """Raises: ContractError for last states that are normed, an aux layer's, or not the sample's."""
        aux = batch.aux[np.concatenate([s.supervised for s in batch.samples])][..., NORM]  # (R, A)
        last = batch.last[:, NORM]
        for layer, layer_id in enumerate(self.spec.aux_layer_ids):
            if layer_id == self.spec.num_layers:
                continue
            for place in np.flatnonzero(all_within(aux[:, layer] == last, batch.last_bounds)):
                states = batch.states[place]
                if torch.equal(states.aux[torch.from_numpy(states.sample.supervised), layer], states.last):
                    raise ContractError(
                        f"sample {states.sample.sample_id}: the last states are those of layer {layer_id}"
                    )
        self._check_norm(batch)
        if self.usual_misses is None:
            return
        counts = count_misses(batch.states, self.teacher, self.against_all)
        for sample, (misses, num_rows) in zip(batch.samples, counts, strict=True):
            if num_rows * _surprise(misses / max(1, num_rows), self.usual_misses) > _IMPROBABLE:
                raise ContractError(
                    f"sample {sample.sample_id}: {misses} of {num_rows} last states do not predict the "
                    f"tokens that follow; at most {self.usual_misses:.0%} is usual",
                    hint="the states are of another request, or shifted by a row",
                )

    @cached_property
    def _norm_weight(self) -> tuple[npt.NDArray[np.intp], Floats]:
        """The final norm's weights that are not next to nothing, and their places."""
        extra = 1.0 if self.teacher.norm_kind == "rms_one_plus" else 0.0
        weight: Floats = (self.teacher.norm_weight.float() + extra).cpu().numpy()
        used = np.flatnonzero(np.abs(weight) > 0.1 * np.median(np.abs(weight)))
        return used, weight[used]

    def _check_norm(self, batch: StatesBatch) -> None:
        """Refuse a sample all rows of which have the root mean square that only the final norm gives them."""
        enough = [s for s in batch.states if len(s.last) >= _MIN_NORMED_ROWS]
        if not enough or not len(self._norm_weight[0]):
            return
        few = self._are_normed(torch.cat([s.last[:_MIN_NORMED_ROWS] for s in enough]))
        for states, rows in zip(enough, few.reshape(-1, _MIN_NORMED_ROWS), strict=True):
            if rows.all() and self._are_normed(states.last).all():  # a few rows tell nearly always
                raise ContractError(
                    f"sample {states.sample.sample_id}: the last states are after the final norm",
                    hint="the teacher norms them itself; the engine must return the stream before the norm",
                )

    def _are_normed(self, rows_RD: torch.Tensor) -> Bools:
        used, weight = self._norm_weight
        rms = np.sqrt(np.square(rows_RD.float().numpy()[:, used] / weight).mean(1))
        normed: Bools = np.abs(rms - 1) < _NORMED
        return normed


def count_misses(
    states: Sequence[HiddenStates], teacher: TeacherHead, against_all: bool
) -> list[tuple[int, int]]:
    """Return in how many supervised rows of each sample the teacher prefers another token of the same answer
    to the one that follows, and how many rows were judged."""
    lasts, tokens = [], []
    for one in states:
        positions = np.flatnonzero(one.sample.supervised)
        positions = positions[positions + 1 < len(one.sample)]
        step = max(1, -(-len(positions) // _MAX_ROWS[against_all]))
        lasts.append(one.last[: len(positions) : step])
        tokens.append(one.sample.input_ids[positions[::step] + 1])
    counts = [len(t) for t in tokens]
    normed = teacher.normed(torch.cat(lasts).to(teacher.head.dtype)).float()
    head = teacher.head[torch.from_numpy(np.concatenate(tokens)).long()].float()
    return [
        _misses(rows @ own.T, ids, against_all)
        for rows, own, ids in zip(normed.split(counts), head.split(counts), tokens, strict=True)
    ]


def _misses(logits: torch.Tensor, ids: npt.NDArray[np.int32], against_all: bool) -> tuple[int, int]:
    """Judge each row's logits [n, n] of the tokens after all rows; a soft-cap and a scale would not change
    which is larger."""
    found = logits.numpy()
    other = ids[:, None] != ids
    if not against_all:
        other &= np.roll(np.eye(len(ids), dtype=bool), len(ids) // 2, axis=1)
    better = (found > found.diagonal()[:, None]) & other
    return int(better.any(1).sum()), int(other.any(1).sum())


def _surprise(found: float, usual: float) -> float:
    """Return the relative entropy in nats of a share ``found`` above the ``usual`` one; 0 below it."""
    if found <= usual:
        return 0.0
    other = (1 - found) * math.log((1 - found) / (1 - usual)) if found < 1 else 0.0
    return found * math.log(found / usual) + other
