"""RMSNorm of gathered rows and its backward, one pass over memory each."""

import torch
import triton
import triton.language as tl

# Programs of the backward kernel; each adds up the weight's gradient over its rows.
_PROGRAMS = 264


def rms(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    index: torch.Tensor | None = None,
    copy: torch.Tensor | None = None,
) -> None:
    """Write the norm of rows ``index`` of x (None: all, in order) to ``out``, and the rows to ``copy``.

    Shapes: x [any, D], weight [D], out [R, D] (its rows may be strided), copy [R, D].
    """
    num_rows, width = out.shape
    _rms[(num_rows,)](
        x,
        index,
        weight,
        out,
        copy,
        width,
        out.stride(0),
        eps,
        HAS_INDEX=index is not None,
        HAS_COPY=copy is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=8,
    )


def rms_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    index: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    residual_index: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the gradient of the rows of x, plus ``residual``, to ``out``; return the weight's gradient [D].

    ``out`` may be any of the inputs' memory, row for row. ``residual_index`` [R] names the residual's row
    for each row, -1 for none.
    Shapes: grad [R, D] (rows may be strided); x, index as in ``rms``; residual [any, D]; out [R, D].
    """
    num_rows, width = grad.shape
    num_programs = min(_PROGRAMS, num_rows)
    partial = torch.empty(num_programs, width, dtype=torch.float32, device=grad.device)
    _rms_backward[(num_programs,)](
        grad,
        x,
        index,
        weight,
        residual,
        residual_index,
        out,
        partial,
        num_rows,
        width,
        grad.stride(0),
        eps,
        HAS_INDEX=index is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_RESIDUAL_INDEX=residual_index is not None,
        HAS_OUT=out is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=8,
    )
    return partial.sum(0)


@triton.jit
def _rms(
    x, index, weight, out, copy, width, out_stride, eps,
    HAS_INDEX: tl.constexpr, HAS_COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = row
    if HAS_INDEX:
        source = tl.load(index + row).to(tl.int64)
    i = tl.arange(0, BLOCK)
    live = i < width
    raw = tl.load(x + source * width + i, mask=live, other=0.0)
    wide = raw.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = wide * scale * tl.load(weight + i, mask=live, other=0.0)
    tl.store(out + row * out_stride + i, normed.to(out.dtype.element_ty), mask=live)
    if HAS_COPY:
        tl.store(copy + row * width + i, raw.to(copy.dtype.element_ty), mask=live)


@triton.jit
def _rms_backward(
    grad_of, x, index, weight, residual, residual_index, out, partial, num_rows, width, grad_stride, eps,
    HAS_INDEX: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_RESIDUAL_INDEX: tl.constexpr,
    HAS_OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    live = i < width
    of_weight = tl.zeros([BLOCK], dtype=tl.float32)
    w = tl.load(weight + i, mask=live, other=0.0)
    for row in range(program, num_rows, tl.num_programs(0)):
        source = row
        if HAS_INDEX:
            source = tl.load(index + row).to(tl.int64)
        wide = tl.load(x + source * width + i, mask=live, other=0.0).to(tl.float32)
        grad = tl.load(grad_of + row * grad_stride + i, mask=live, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
        normed = wide * scale
        of_weight += grad * normed
        if HAS_OUT:
            inner = grad * w
            result = scale * (inner - normed * (tl.sum(inner * normed, 0) / width))
            if HAS_RESIDUAL:
                added = row
                there = live
                if HAS_RESIDUAL_INDEX:
                    added = tl.load(residual_index + row).to(tl.int64)
                    there = live & (added >= 0)
                result += tl.load(residual + added * width + i, mask=there, other=0.0).to(tl.float32)
            tl.store(out + row * width + i, result.to(out.dtype.element_ty), mask=live)
    tl.store(partial + program * width + i, of_weight, mask=live)
