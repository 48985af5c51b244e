"""Whether last states are the sample's own: what the teacher makes of them, without its full head.

States of another request, or shifted by a row, have the right shape and magnitude. What they do not do is
prefer the token that really follows to another token of the same answer. How often the target's own
states do is measured on samples computed alone; a sample that does much worse is refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eyas.errors import ContractError
from eyas.store.shards import check_shape
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

    def __call__(self, states: HiddenStates, aux_norms_TL: torch.Tensor, last_norms_R: torch.Tensor) -> None:
        """Raises: ContractError for states of another shape, last states that are normed, an aux layer's, or
        not the sample's."""
        check_shape(states, self.spec)
        sample = states.sample
        rows_TL = aux_norms_TL[torch.from_numpy(sample.supervised)]
        for place, layer_id in enumerate(self.spec.aux_layer_ids):
            if layer_id != self.spec.num_layers and torch.equal(rows_TL[:, place], last_norms_R):
                raise ContractError(
                    f"sample {sample.sample_id}: the last states are those of layer {layer_id}"
                )
        if is_normed(states.last, self.teacher):
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
    logits = normed.float() @ teacher.head[ids].float().T  # (n, n)
    own = logits.diagonal()
    other = torch.ones_like(logits, dtype=torch.bool)
    if not against_all:
        other = torch.eye(len(ids), dtype=torch.bool).roll(len(ids) // 2, 1)
    other &= ids[:, None] != ids
    better = (logits > own[:, None]) & other
    return int(better.any(1).sum()), int(other.any(1).sum())


def is_normed(last_RD: torch.Tensor, teacher: TeacherHead) -> bool:
    """Whether all rows have the root mean square that only the final norm gives them."""
    if len(last_RD) < _MIN_NORMED_ROWS:
        return False
    weight = teacher.norm_weight.float() + (1.0 if teacher.norm_kind == "rms_one_plus" else 0.0)
    used = weight.abs() > 0.1 * weight.abs().median()
    if not used.any():
        return False
    for rows in (last_RD[:_MIN_NORMED_ROWS], last_RD):  # a few rows tell nearly always
        rms = (rows.float()[:, used] / weight[used]).square().mean(1).sqrt()
        if not ((rms - 1).abs() < _NORMED).all():
            return False
    return True


def _surprise(found: float, usual: float) -> float:
    """Return the relative entropy in nats of a share ``found`` above the ``usual`` one; 0 below it."""
    if found <= usual:
        return 0.0
    other = (1 - found) * math.log((1 - found) / (1 - usual)) if found < 1 else 0.0
    return found * math.log(found / usual) + other
