"""Rotary positions, SwiGLU and its backward, over or into memory that is already there."""

import torch
import triton
import triton.language as tl


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_rotated: int, out: torch.Tensor
) -> None:
    """Write x [R, heads * head_dim] with its first ``num_rotated`` heads turned to ``out``, which may be x.

    Shapes: cos, sin [R, head_dim] fp32.
    """
    num_rows, head_dim = cos.shape
    heads = x.shape[1] // head_dim
    _rotate[(num_rows,)](
        x, out, cos, sin, num_rotated, heads, HALF=head_dim // 2, HEADS_P2=triton.next_power_of_2(heads)
    )


def swiglu(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Write silu(gate) * up to ``out`` [R, I]; gate_up [R, 2 I]."""
    num_rows, width = out.shape
    block = 1024
    _swiglu[(num_rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block)


def swiglu_backward_(grad: torch.Tensor, gate_up: torch.Tensor) -> None:
    """Write the gradient of gate and up [R, 2 I] over them; ``grad`` [R, I] is that of silu(gate) * up."""
    num_rows, width = grad.shape
    block = 1024
    _swiglu_backward[(num_rows, triton.cdiv(width, block))](grad, gate_up, width, BLOCK=block)


@triton.jit
def _rotate(x, out, cos_of, sin_of, num_rotated, heads, HALF: tl.constexpr, HEADS_P2: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_P2)[:, None]
    i = tl.arange(0, HALF)[None, :]
    at = row * heads * (2 * HALF) + head * (2 * HALF) + i
    live = head < heads
    turned = head < num_rotated
    cos = tl.load(cos_of + row * (2 * HALF) + i)
    sin = tl.load(sin_of + row * (2 * HALF) + i)
    a = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, mask=live, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + at, tl.where(turned, a * cos - b * sin, a).to(kind), mask=live)
    tl.store(out + at + HALF, tl.where(turned, b * cos + a * sin, b).to(kind), mask=live)


@triton.jit
def _swiglu(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = i < width
    at = gate_up + row * 2 * width + i
    gate = tl.load(at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * width + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=live)


@triton.jit
def _swiglu_backward(grad_of, gate_up, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = i < width
    at = gate_up + row * 2 * width + i
    grad = tl.load(grad_of + row * width + i, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=live, other=0.0).to(tl.float32)
    open_share = tl.sigmoid(gate)
    kind = gate_up.dtype.element_ty
    tl.store(at, (grad * up * open_share * (1 + gate * (1 - open_share))).to(kind), mask=live)
    tl.store(at + width, (grad * gate * open_share).to(kind), mask=live)
