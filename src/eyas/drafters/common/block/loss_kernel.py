"""The loss of rows of logits against the teacher's logits, and its gradient written over them.

No probability is ever stored: p and q are exponentials of logits that are read again. A draft's row is read
once for its log-sum-exp, once more for sums over p and q where the teacher's distribution is asked for, and
once for the gradient.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.drafters.common.block.loss import LossMix

_BLOCK, _WARPS = 4096, 8


@dataclass(frozen=True)
class TeacherRows:
    """Shapes: logits [r, W] of the draft vocabulary; lse [r] their log-sum-exp; mass [r], the share of all
    probability that they have; row [R], each draft row's place among them."""

    logits: torch.Tensor
    lse: torch.Tensor
    mass: torch.Tensor
    row: torch.Tensor


@dataclass(frozen=True)
class RowSums:
    """Shapes: all [R] fp32. KL and L1 are unweighted; overlap is the sum of min(mass p, q)."""

    kl: torch.Tensor
    l1: torch.Tensor
    overlap: torch.Tensor


def log_sum_exp(logits: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-sum-exp [R] of rows times ``scale``, and the first argmax [R] of each; logits [R, W]."""
    num_rows, width = logits.shape
    lse = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    best = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _log_sum_exp[(num_rows,)](
            logits, lse, best, scale, width, logits.stride(0), BLOCK=_block(width), num_warps=_WARPS
        )
    return lse, best


def gradient_(
    logits: torch.Tensor,
    lse: torch.Tensor,
    label: torch.Tensor,
    weight: torch.Tensor,
    scale: float,
    mix: LossMix,
    teacher: TeacherRows | None,
) -> RowSums | None:
    """Turn ``logits`` into ``weight`` times the gradient of the mix with respect to them, scale included.

    Shapes: logits [R, W]; label, weight [R], lse [R] of the scaled logits. A row of weight 0 becomes 0.
    """
    num_rows, width = logits.shape
    sums = torch.empty(3, num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        # Without a teacher no pointer of it is read.
        p = teacher or TeacherRows(logits, lse, lse, label)
        _gradient[(num_rows,)](
            logits,
            lse,
            label,
            weight,
            p.logits,
            p.lse,
            p.mass,
            p.row,
            sums,
            scale,
            mix.ce,
            mix.kl,
            mix.l1,
            num_rows,
            width,
            logits.stride(0),
            p.logits.stride(0),
            HAS_TEACHER=teacher is not None,
            BLOCK=_block(width),
            num_warps=_WARPS,
        )
    return RowSums(*sums) if teacher else None


def _block(width: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(width))


@triton.jit
def _log_sum_exp(logits, lse_of, best_of, scale, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z_row = logits + row * stride
    i = tl.arange(0, BLOCK)
    # Each lane keeps its own running maximum and sum; they meet once, after the pass.
    top = tl.full([BLOCK], -1.0e30, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    best = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, width, BLOCK):
        at = start + i
        z = tl.load(z_row + at, mask=at < width, other=-float("inf")).to(tl.float32) * scale
        best = tl.where(z > top, at, best)
        new_top = tl.maximum(top, z)
        total = total * tl.exp(top - new_top) + tl.exp(z - new_top)
        top = new_top
    highest = tl.max(top, 0)
    tl.store(lse_of + row, highest + tl.log(tl.sum(total * tl.exp(top - highest), 0)))
    tl.store(best_of + row, tl.min(tl.where(top == highest, best, width - 1), 0).to(tl.int64))


@triton.jit
def _gradient(
    logits, lse_of, label_of, weight_of, teacher, teacher_lse, mass_of, teacher_row, sums,
    scale, ce, kl, l1, num_rows, width, stride, teacher_stride,
    HAS_TEACHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_row = logits + row * stride
    i = tl.arange(0, BLOCK)
    lse = tl.load(lse_of + row)
    label = tl.load(label_of + row)
    weight = tl.load(weight_of + row) * scale
    inner = 0.0
    t_row, t_lse = teacher, lse
    if HAS_TEACHER:
        judge = tl.load(teacher_row + row).to(tl.int64)
        t_row = teacher + judge * teacher_stride
        t_lse = tl.load(teacher_lse + judge)
        mass = tl.load(mass_of + judge)
        divergence = tl.zeros([BLOCK], dtype=tl.float32)
        distance = tl.zeros([BLOCK], dtype=tl.float32)
        overlap = tl.zeros([BLOCK], dtype=tl.float32)
        signed = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, width, BLOCK):
            at = start + i
            live = at < width
            log_q = tl.load(z_row + at, mask=live, other=-1.0e30).to(tl.float32) * scale - lse
            log_p = tl.load(t_row + at, mask=live, other=-1.0e30).to(tl.float32) - t_lse
            q, p = tl.exp(log_q), tl.exp(log_p)
            divergence += tl.where(p > 0, p * (log_p - log_q), 0.0)
            distance += tl.abs(q - p)
            overlap += tl.minimum(mass * p, q)
            signed += tl.where(q > p, q, tl.where(q < p, -q, 0.0))
        inner = tl.sum(signed, 0)
        tl.store(sums + row, tl.sum(divergence, 0))
        tl.store(sums + num_rows + row, tl.sum(distance, 0))
        tl.store(sums + 2 * num_rows + row, tl.sum(overlap, 0))

    for start in range(0, width, BLOCK):
        at = start + i
        live = at < width
        z = tl.load(z_row + at, mask=live, other=-1.0e30).to(tl.float32)
        q = tl.exp(z * scale - lse)
        gradient = (ce + kl) * q - tl.where(at == label, ce, 0.0)
        if HAS_TEACHER:
            p = tl.exp(tl.load(t_row + at, mask=live, other=-1.0e30).to(tl.float32) - t_lse)
            sign = tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))
            gradient += l1 * q * (sign - inner) - kl * p
        tl.store(z_row + at, (weight * gradient).to(logits.dtype.element_ty), mask=live)
