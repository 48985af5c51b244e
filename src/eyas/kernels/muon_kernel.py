"""Muon's update of matrices on a GPU: torch's, with half of each symmetric product and fewer wide ones.

Newton-Schulz takes X to p(X X^T) X, again and again. All that comes of X X^T is symmetric, so a triangle of
it is computed and mirrored; and where X is wide, several steps are taken on X X^T before X itself is
multiplied ("Gram Newton-Schulz", https://dao-lab.ai/blog/2026/gram-newton-schulz). In float16: all values
are small, and it comes closer to exact steps than torch.optim.Muon's steps in bfloat16.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

# What is multiplied has this norm for 1: a large matrix's entries would be too small for float16.
SCALE = 256.0
_CHUNK = 3  # steps between products with X itself: rounding grows with each
_WIDE = 1.5  # columns for each row from which on chunks take fewer operations


def muon(
    master: torch.Tensor,
    gradient: torch.Tensor,
    momentum: torch.Tensor,
    copy: torch.Tensor,
    rate: torch.Tensor,
    divisor: torch.Tensor,
    taken: torch.Tensor,
    options: Mapping[str, Any],
) -> None:
    """Update fp32 ``master`` [A, B] and ``momentum`` with ``gradient`` / ``divisor``, and ``copy`` too.

    Where ``taken`` is false nothing changes. ``options`` are those of a parameter group of torch.optim.Muon
    with Nesterov momentum and updates of AdamW's size. Scalars are tensors on the device.
    """
    size, block = master.numel(), 2048
    grid = (triton.cdiv(size, block),)
    update = torch.empty_like(master)
    _gather[grid](gradient, momentum, update, divisor, taken, size, options["momentum"], BLOCK=block)
    tall = master.shape[0] > master.shape[1]
    direction = orthogonalized(
        update.T.contiguous() if tall else update,
        options["ns_coefficients"],
        options["ns_steps"],
        options["eps"],
    )
    direction = direction.T.contiguous() if tall else direction
    factor = 0.2 * math.sqrt(max(master.shape)) / SCALE
    _apply[grid](master, direction, copy, rate, taken, size, factor, options["weight_decay"], BLOCK=block)


def orthogonalized(
    x: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """Return fp32 ``x`` [A, B], A <= B, in fp16 with singular values near SCALE; torch's come near 1."""
    a, b, c = coefficients
    x = torch.div(x, x.norm().clamp(min=eps) / SCALE, out=torch.empty_like(x, dtype=torch.float16))
    if x.shape[1] < _WIDE * x.shape[0]:
        for _ in range(num_steps):
            gram = symmetric_product(x, x, SCALE**-2)
            x = torch.addmm(x, symmetric_product(gram, gram, c, gram, b), x, beta=a)
        return x
    for start in range(0, num_steps, _CHUNK):
        # A step multiplies X by aI + Q, a chunk by scale I + P: rounding never sees the large diagonal.
        gram = symmetric_product(x, x, SCALE**-2)
        q = symmetric_product(gram, gram, c, gram, b)
        p, scale = q, a
        for _ in range(min(_CHUNK, num_steps - start) - 1):
            half = symmetric_product(gram, q, 1.0, gram, a)
            gram = symmetric_product(half, q, 1.0, half, a)
            q = symmetric_product(gram, gram, c, gram, b)
            p, scale = symmetric_product(q, p, 1.0, p, a, q, scale), scale * a
        x = torch.addmm(x, p, x, beta=scale)
    return x


def symmetric_product(
    left: torch.Tensor,
    right: torch.Tensor,
    alpha: float = 1.0,
    plus: torch.Tensor | None = None,
    beta: float = 0.0,
    further: torch.Tensor | None = None,
    gamma: float = 0.0,
) -> torch.Tensor:
    """Return alpha left right^T + beta plus + gamma further, [A, A], which must be symmetric.

    ``left`` and ``right`` are [A, B], all of them contiguous. The triangle below the diagonal is mirrored.
    """
    num_rows, num_columns = left.shape
    out = left.new_empty(num_rows, num_rows)
    block, depth = 128, 64
    tiles = triton.cdiv(num_rows, block)
    _product[(tiles * (tiles + 1) // 2,)](
        left, right, out if plus is None else plus, out if further is None else further, out,
        num_rows, num_columns, alpha, beta, gamma,
        HAS_PLUS=plus is not None, HAS_FURTHER=further is not None, EVEN=num_columns % depth == 0,
        BLOCK=block, DEPTH=depth, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _product(
    left, right, plus, further, out, num_rows, num_columns, alpha, beta, gamma,
    HAS_PLUS: tl.constexpr, HAS_FURTHER: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    # The row of the triangle, but for rounding.
    i = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1) - 1) / 2).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    j = tile - i * (i + 1) // 2
    rows = i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = j.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, DEPTH)
    of_left = left + (rows % num_rows)[:, None] * num_columns + depth[None, :]
    of_right = right + (columns % num_rows)[None, :] * num_columns + depth[:, None]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, num_columns, DEPTH):
        if EVEN:
            total = tl.dot(tl.load(of_left), tl.load(of_right), total)
        else:
            live = start + depth < num_columns
            one = tl.load(of_left, mask=live[None, :], other=0.0)
            total = tl.dot(one, tl.load(of_right, mask=live[:, None], other=0.0), total)
        of_left += DEPTH
        of_right += DEPTH
    total *= alpha
    inside = (rows < num_rows)[:, None] & (columns < num_rows)[None, :]
    place = rows[:, None] * num_rows + columns[None, :]
    if HAS_PLUS:
        total += beta * tl.load(plus + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_FURTHER:
        total += gamma * tl.load(further + place, mask=inside, other=0.0).to(tl.float32)
    found = total.to(out.dtype.element_ty)
    tl.store(out + place, found, mask=inside)
    if i != j:
        inside = (columns < num_rows)[:, None] & (rows < num_rows)[None, :]
        tl.store(out + columns[:, None] * num_rows + rows[None, :], tl.trans(found), mask=inside)


@triton.jit
def _gather(gradient, momentum_of, update, divisor_of, taken, size, beta, BLOCK: tl.constexpr):
    if tl.load(taken) == 0:
        return
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < size
    g = tl.load(gradient + i, mask=live, other=0.0) / tl.load(divisor_of)
    momentum = tl.load(momentum_of + i, mask=live, other=0.0)
    momentum += (1 - beta) * (g - momentum)
    tl.store(momentum_of + i, momentum, mask=live)
    tl.store(update + i, g + beta * (momentum - g), mask=live)


@triton.jit
def _apply(master, direction, copy, rate_of, taken, size, factor, decay, BLOCK: tl.constexpr):
    if tl.load(taken) == 0:
        return
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < size
    rate = tl.load(rate_of)
    p = tl.load(master + i, mask=live, other=0.0) * (1 - rate * decay)
    p -= rate * factor * tl.load(direction + i, mask=live, other=0.0).to(tl.float32)
    tl.store(master + i, p, mask=live)
    tl.store(copy + i, p.to(copy.dtype.element_ty), mask=live)
