"""RMSNorm of each head and rotary positions of the result, forward and backward in one pass each."""

import torch
import triton
import triton.language as tl

# Programs of the backward kernel; each adds up the weight's gradient over its rows.
_PROGRAMS = 528


def norm_rotate(
    x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Return the heads of x [R, heads * head_dim], each normed and turned.

    Shapes: weight [head_dim]; cos, sin [R, head_dim] fp32, whose halves are equal.
    """
    num_rows, head_dim = cos.shape
    heads = x.shape[1] // head_dim
    out = torch.empty_like(x)
    if num_rows:
        _norm_rotate[(num_rows,)](x, out, weight, cos, sin, eps, heads, **_tiles(heads, head_dim))
    return out


def norm_rotate_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and of the weight [head_dim], fp32; ``grad`` is that of ``norm_rotate``."""
    num_rows, head_dim = cos.shape
    heads = x.shape[1] // head_dim
    out = torch.empty_like(x)
    num_programs = min(_PROGRAMS, num_rows)
    partial = torch.empty(num_programs, head_dim, dtype=torch.float32, device=x.device)
    if num_rows:
        _norm_rotate_backward[(num_programs,)](
            grad,
            x,
            out,
            weight,
            cos,
            sin,
            partial,
            eps,
            num_rows,
            heads,
            num_warps=8,
            **_tiles(heads, head_dim),
        )
    return out, partial.sum(0)


def _tiles(heads: int, head_dim: int) -> dict[str, int]:
    half = head_dim // 2
    return {"HALF": half, "HALF_P2": triton.next_power_of_2(half), "HEADS_P2": triton.next_power_of_2(heads)}


@triton.jit
def _norm_rotate(
    x, out, weight, cos_of, sin_of, eps, heads,
    HALF: tl.constexpr, HALF_P2: tl.constexpr, HEADS_P2: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_P2)[:, None]
    i = tl.arange(0, HALF_P2)[None, :]
    inside = i < HALF
    live = (head < heads) & inside
    at = (row * heads + head) * (2 * HALF) + i
    cos = tl.load(cos_of + row * (2 * HALF) + i, mask=inside, other=0.0)
    sin = tl.load(sin_of + row * (2 * HALF) + i, mask=inside, other=0.0)
    a = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, mask=live, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    a *= scale * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    b *= scale * tl.load(weight + HALF + i, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + at, (a * cos - b * sin).to(kind), mask=live)
    tl.store(out + at + HALF, (b * cos + a * sin).to(kind), mask=live)


@triton.jit
def _norm_rotate_backward(
    grad_of, x, out, weight, cos_of, sin_of, partial, eps, num_rows, heads,
    HALF: tl.constexpr, HALF_P2: tl.constexpr, HEADS_P2: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_P2)[:, None]
    i = tl.arange(0, HALF_P2)[None, :]
    inside = i < HALF
    live = (head < heads) & inside
    w_a = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    w_b = tl.load(weight + HALF + i, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    of_w_a = tl.zeros([HEADS_P2, HALF_P2], dtype=tl.float32)
    of_w_b = tl.zeros([HEADS_P2, HALF_P2], dtype=tl.float32)
    for row in range(program, num_rows, tl.num_programs(0)):
        at = (row * heads + head) * (2 * HALF) + i
        cos = tl.load(cos_of + row * (2 * HALF) + i, mask=inside, other=0.0)
        sin = tl.load(sin_of + row * (2 * HALF) + i, mask=inside, other=0.0)
        a = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
        b = tl.load(x + at + HALF, mask=live, other=0.0).to(tl.float32)
        turned_a = tl.load(grad_of + at, mask=live, other=0.0).to(tl.float32)
        turned_b = tl.load(grad_of + at + HALF, mask=live, other=0.0).to(tl.float32)
        grad_a = turned_a * cos + turned_b * sin
        grad_b = turned_b * cos - turned_a * sin
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a *= scale
        b *= scale
        of_w_a += grad_a * a
        of_w_b += grad_b * b
        grad_a *= w_a
        grad_b *= w_b
        along = ((tl.sum(grad_a * a, 1) + tl.sum(grad_b * b, 1)) / (2 * HALF))[:, None]
        tl.store(out + at, (scale * (grad_a - a * along)).to(kind), mask=live)
        tl.store(out + at + HALF, (scale * (grad_b - b * along)).to(kind), mask=live)
    to = partial + program * (2 * HALF) + tl.arange(0, HALF_P2)
    inside_row = tl.arange(0, HALF_P2) < HALF
    tl.store(to, tl.sum(of_w_a, 0), mask=inside_row)
    tl.store(to + HALF, tl.sum(of_w_b, 0), mask=inside_row)
