"""Loss of draft logits against the teacher, and its gradient written over the logits, in one kernel.

Per row: one pass for the log-sum-exp, one more for the overlap where the loss needs it, one for the
gradient. Later passes read the row from cache, and logits are never kept.
"""

import torch
import triton
import triton.language as tl

from eyas.drafters.common.loss import HYBRID_DECAY, LossKind
from eyas.drafters.common.teacher_targets import TeacherTargets

_BLOCK, _WARPS = 2048, 8
_KINDS: dict[LossKind, int] = {"kl": 0, "lk": 1, "hybrid": 2}


def loss_and_gradient_(
    logits: torch.Tensor,
    targets: TeacherTargets,
    index: torch.Tensor,
    weight: float,
    kind: LossKind,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the unweighted loss and the argmax of each row [R]; ``logits`` become ``weight`` * gradient.

    Shapes: logits [R, W]; index [R], each row's place among ``targets``. A row whose target is outside the
    draft vocabulary has loss 0, gradient 0 and no meaningful argmax.
    """
    num_rows, width = logits.shape
    value = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    best = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _loss[(num_rows,)](
        logits,
        targets.probabilities,
        targets.mass,
        targets.negative_entropy,
        targets.in_draft,
        targets.mass if targets.coverage is None else targets.coverage,
        index,
        value,
        best,
        weight,
        width,
        HYBRID_DECAY,
        KIND=_KINDS[kind],
        WITH_COVERAGE=targets.coverage is not None,
        WITH_GRADIENT=with_gradient,
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        num_warps=_WARPS,
    )
    return value, best


@triton.jit
def _loss(
    logits, probabilities, mass_of, entropy_of, in_draft, coverage_of, index, value, best_of, weight, width,
    hybrid_decay,
    KIND: tl.constexpr, WITH_COVERAGE: tl.constexpr, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_row = logits + row * width
    judge = tl.load(index + row).to(tl.int64)
    p_row = probabilities + judge * width
    mass = tl.load(mass_of + judge)
    w = tl.arange(0, BLOCK)
    if tl.load(in_draft + judge) == 0:
        tl.store(value + row, 0.0)
        tl.store(best_of + row, 0)
        if WITH_GRADIENT:
            for start in range(0, width, BLOCK):
                at = start + w
                tl.store(z_row + at, tl.zeros([BLOCK], logits.dtype.element_ty), mask=at < width)
        return

    # Each lane keeps its own running maximum and sum; they meet once, after the pass.
    top = tl.full([BLOCK], -1.0e30, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    best = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, width, BLOCK):
        at = start + w
        z = tl.load(z_row + at, mask=at < width, other=-float("inf")).to(tl.float32)
        best = tl.where(z > top, at, best)
        new_top = tl.maximum(top, z)
        total = total * tl.exp(top - new_top) + tl.exp(z - new_top)
        top = new_top
    highest, lane = tl.max(top, 0, return_indices=True)
    lse = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    tl.store(best_of + row, tl.sum(tl.where(w == lane, best, 0), 0).to(tl.int64))

    # Of the target's true probabilities: the sum of min(p, q), and the part of it where q is the smaller.
    overlap, below, coverage = 0.0, 0.0, 1.0
    if WITH_COVERAGE:
        coverage = tl.load(coverage_of + judge)
    if KIND != 0:
        overlaps = tl.zeros([BLOCK], dtype=tl.float32)
        belows = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, width, BLOCK):
            at = start + w
            z = tl.load(z_row + at, mask=at < width, other=-float("inf")).to(tl.float32)
            p = coverage * tl.load(p_row + at, mask=at < width, other=0.0).to(tl.float32)
            q = tl.exp(z - lse)
            overlaps += tl.minimum(p, q)
            belows += tl.where(q < p, q, 0.0)
        overlap, below = tl.maximum(tl.sum(overlaps, 0), 1.0e-6), tl.sum(belows, 0)

    of_kl, of_overlap = 1.0, 0.0  # loss = of_kl * KL - of_overlap * overlap, to first order
    if KIND == 1:
        of_kl, of_overlap = 0.0, 1.0 / overlap
    if KIND == 2:
        of_kl = tl.exp(-hybrid_decay * overlap)
        of_overlap = 1.0 - of_kl

    cross = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = start + w
        z = tl.load(z_row + at, mask=at < width, other=-float("inf")).to(tl.float32)
        p = tl.load(p_row + at, mask=at < width, other=0.0).to(tl.float32)
        cross += tl.where(p > 0, p * z, 0.0)
        if WITH_GRADIENT:
            q = tl.exp(z - lse)
            gradient = of_kl * (mass * q - p)
            if KIND != 0:
                gradient -= of_overlap * (tl.where(q < coverage * p, q, 0.0) - q * below)
            tl.store(z_row + at, (weight * gradient).to(logits.dtype.element_ty), mask=at < width)
    kl = tl.load(entropy_of + judge) + mass * lse - tl.sum(cross, 0)
    if KIND == 0:
        tl.store(value + row, kl)
    elif KIND == 1:
        tl.store(value + row, -tl.log(overlap))
    else:
        tl.store(value + row, of_kl * kl + of_overlap * (1.0 - overlap))
