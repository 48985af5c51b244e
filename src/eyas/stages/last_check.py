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

from eyas.errors import ContractError
from eyas.store.shards import check_shape
from eyas.targets.teacher import TeacherHead
from eyas.types import HiddenStates, TargetSpec

Floats = npt.NDArray[np.float32]

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
class LastCheck:
    """``usual_misses`` is the share of rows expected to miss; None: tokens are not judged."""

    spec: TargetSpec
    teacher: TeacherHead
    usual_misses: float | None
    against_all: bool = False

    @classmethod
    def calibrated(cls, spec: TargetSpec, teacher: TeacherHead, known: Sequence[HiddenStates]) -> "LastCheck":
        """Measure on states that are known to be right."""
        for against_all, most, least in _WAYS:
            judged = [count_misses(states, teacher, against_all) for states in known]
            shares = [misses / rows for misses, rows in judged if rows >= _MIN_CALIBRATING_ROWS]
            if shares and max(shares) <= most:
                return cls(spec, teacher, max(least, 2 * max(shares)), against_all)
        return cls(spec, teacher, None)

    def __call__(self, states: HiddenStates, aux_norms_TL: Floats, last_norms_R: Floats) -> None:
        """Raises: ContractError for states of another shape, last states that are normed, an aux layer's, or
        not the sample's."""
        check_shape(states, self.spec)
        sample = states.sample
        rows_RL = aux_norms_TL[sample.supervised]
        for place, layer_id in enumerate(self.spec.aux_layer_ids):
            if layer_id == self.spec.num_layers or not np.array_equal(rows_RL[:, place], last_norms_R):
                continue
            if torch.equal(states.aux[torch.from_numpy(sample.supervised), place], states.last):
                raise ContractError(
                    f"sample {sample.sample_id}: the last states are those of layer {layer_id}"
                )
        if self._is_normed(states.last):
            raise ContractError(
                f"sample {sample.sample_id}: the last states are after the final norm",
                hint="the teacher norms them itself; the engine must return the stream before the norm",
            )
        if self.usual_misses is None:
            return
        misses, num_rows = count_misses(states, self.teacher, self.against_all)
        if num_rows * _surprise(misses / max(1, num_rows), self.usual_misses) > _IMPROBABLE:
            raise ContractError(
                f"sample {sample.sample_id}: {misses} of {num_rows} last states do not predict the tokens "
                f"that follow; at most {self.usual_misses:.0%} is usual",
                hint="the states are of another request, or shifted by a row",
            )

    @cached_property
    def _norm_weight(self) -> tuple[npt.NDArray[np.intp], Floats]:
        """The final norm's weights that are not next to nothing, and their places."""
        extra = 1.0 if self.teacher.norm_kind == "rms_one_plus" else 0.0
        weight: Floats = (self.teacher.norm_weight.float() + extra).cpu().numpy()
        used = np.flatnonzero(np.abs(weight) > 0.1 * np.median(np.abs(weight)))
        return used, weight[used]

    def _is_normed(self, last_RD: torch.Tensor) -> bool:
        """Whether all rows have the root mean square that only the final norm gives them."""
        used, weight = self._norm_weight
        if len(last_RD) < _MIN_NORMED_ROWS or not len(used):
            return False
        for rows in (last_RD[:_MIN_NORMED_ROWS], last_RD):  # a few rows tell nearly always
            rms = np.sqrt(np.square(rows.float().numpy()[:, used] / weight).mean(1))
            if not (np.abs(rms - 1) < _NORMED).all():
                return False
        return True


def count_misses(states: HiddenStates, teacher: TeacherHead, against_all: bool) -> tuple[int, int]:
    """Return in how many supervised rows the teacher prefers another token of the same answer to the one
    that follows, and how many rows were judged."""
    sample = states.sample
    positions = np.flatnonzero(sample.supervised)
    positions = positions[positions + 1 < len(sample)]
    rows = np.arange(0, len(positions), max(1, -(-len(positions) // _MAX_ROWS[against_all])))
    ids = torch.from_numpy(sample.input_ids[positions[rows] + 1]).long()
    normed = teacher.normed(states.last[torch.from_numpy(rows)].to(teacher.head.dtype))
    # Each row's logits of all rows' tokens; a soft-cap and a scale do not change which is larger.
    logits = (normed.float() @ teacher.head[ids].float().T).numpy()  # (n, n)
    tokens = ids.numpy()
    other = tokens[:, None] != tokens
    if not against_all:
        other &= np.roll(np.eye(len(tokens), dtype=bool), len(tokens) // 2, axis=1)
    better = (logits > logits.diagonal()[:, None]) & other
    return int(better.any(1).sum()), int(other.any(1).sum())


def _surprise(found: float, usual: float) -> float:
    """Return the relative entropy in nats of a share ``found`` above the ``usual`` one; 0 below it."""
    if found <= usual:
        return 0.0
    other = (1 - found) * math.log((1 - found) / (1 - usual)) if found < 1 else 0.0
    return found * math.log(found / usual) + other
