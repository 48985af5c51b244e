"""Loss of draft logits against the teacher, and its gradient written over the logits, in one kernel.

Per row: one pass for the log-sum-exp and the sums over the teacher, one more for the overlap where the
loss needs it, one for the gradient. A row's logits are read again from cache, and never kept.
"""

import torch
import triton
import triton.language as tl

from eyas.train.loss import HYBRID_DECAY, LossKind

_KINDS: dict[LossKind, int] = {"kl": 0, "lk": 1, "hybrid": 2}


def loss_and_gradient_(
    logits: torch.Tensor,
    probabilities: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    weight: float,
    kind: LossKind,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the unweighted loss and the argmax of each row [R]; ``logits`` become ``weight`` * gradient.

    Shapes: logits [R, W]; probabilities [P, W]; index [R] into it; counts [R] bool. A row that does not
    count has loss 0, gradient 0 and no meaningful argmax.
    """
    num_rows, width = logits.shape
    value = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    best = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _loss[(num_rows,)](
        logits,
        probabilities,
        index,
        counts,
        value,
        best,
        weight,
        width,
        HYBRID_DECAY,
        KIND=_KINDS[kind],
        WITH_GRADIENT=with_gradient,
        BLOCK=min(8192, triton.next_power_of_2(width)),
        num_warps=16,
    )
    return value, best


@triton.jit
def _loss(
    logits, probabilities, index, counts, value, best_of, weight, width, hybrid_decay,
    KIND: tl.constexpr, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_row = logits + row * width
    p_row = probabilities + tl.load(index + row).to(tl.int64) * width
    w = tl.arange(0, BLOCK)
    if tl.load(counts + row) == 0:
        tl.store(value + row, 0.0)
        tl.store(best_of + row, 0)
        if WITH_GRADIENT:
            for start in range(0, width, BLOCK):
                at = start + w
                tl.store(z_row + at, tl.zeros([BLOCK], logits.dtype.element_ty), mask=at < width)
        return

    top, total = -float("inf"), 0.0
    mass, cross, negative_entropy = 0.0, 0.0, 0.0
    best = 0
    for start in range(0, width, BLOCK):
        at = start + w
        z = tl.load(z_row + at, mask=at < width, other=-float("inf")).to(tl.float32)
        p = tl.load(p_row + at, mask=at < width, other=0.0).to(tl.float32)
        block_top, block_best = tl.max(z, 0, return_indices=True)
        best = tl.where(block_top > top, start + block_best, best)
        new_top = tl.maximum(top, block_top)
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(z - new_top), 0)
        top = new_top
        mass += tl.sum(p, 0)
        cross += tl.sum(tl.where(p > 0, p * z, 0.0), 0)
        negative_entropy += tl.sum(tl.where(p > 0, p * tl.log(p), 0.0), 0)
    lse = top + tl.log(total)
    kl = negative_entropy - cross + mass * lse

    overlap, below = 0.0, 0.0  # sum of min(p, q), and the part of it where q < p
    if KIND != 0:
        for start in range(0, width, BLOCK):
            at = start + w
            z = tl.load(z_row + at, mask=at < width, other=-float("inf")).to(tl.float32)
            p = tl.load(p_row + at, mask=at < width, other=0.0).to(tl.float32)
            q = tl.exp(z - lse)
            overlap += tl.sum(tl.minimum(p, q), 0)
            below += tl.sum(tl.where(q < p, q, 0.0), 0)
        overlap = tl.maximum(overlap, 1.0e-6)

    of_kl, of_overlap = 1.0, 0.0  # loss = of_kl * KL - of_overlap * overlap, to first order
    if KIND == 0:
        tl.store(value + row, kl)
    elif KIND == 1:
        of_kl, of_overlap = 0.0, 1.0 / overlap
        tl.store(value + row, -tl.log(overlap))
    else:
        of_kl = tl.exp(-hybrid_decay * overlap)
        of_overlap = 1.0 - of_kl
        tl.store(value + row, of_kl * kl + of_overlap * (1.0 - overlap))
    tl.store(best_of + row, best)

    if WITH_GRADIENT:
        for start in range(0, width, BLOCK):
            at = start + w
            z = tl.load(z_row + at, mask=at < width, other=-float("inf")).to(tl.float32)
            p = tl.load(p_row + at, mask=at < width, other=0.0).to(tl.float32)
            q = tl.exp(z - lse)
            gradient = of_kl * (mass * q - p)
            if KIND != 0:
                gradient -= of_overlap * (tl.where(q < p, q, 0.0) - q * below)
            tl.store(z_row + at, (weight * gradient).to(logits.dtype.element_ty), mask=at < width)
