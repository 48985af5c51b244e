"""AdamW's update of one tensor and its copy in the compute dtype, in one pass over memory."""

import torch
import triton
import triton.language as tl


def adamw(
    master: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    copy: torch.Tensor | None,
    rate: torch.Tensor,
    divisor: torch.Tensor,
    shares: torch.Tensor,
    taken: torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update fp32 ``master``, ``mean`` and ``square`` with ``gradient`` / ``divisor``, and ``copy`` too.

    Where ``taken`` is false nothing changes. ``shares`` [2] fp32 are 1 - beta ** step, the step included.
    Scalars are tensors on the device.
    """
    size = master.numel()
    block = 2048
    _adamw[(triton.cdiv(size, block),)](
        master,
        gradient,
        mean,
        square,
        copy,
        rate,
        divisor,
        shares,
        taken,
        size,
        *betas,
        eps,
        weight_decay,
        HAS_COPY=copy is not None,
        BLOCK=block,
        num_warps=8,
    )


@triton.jit
def _adamw(
    master, gradient, mean_of, square_of, copy, rate_of, divisor_of, shares, taken, size,
    beta1, beta2, eps, decay,
    HAS_COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(taken) == 0:
        return
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < size
    rate, divisor = tl.load(rate_of), tl.load(divisor_of)
    mean_share, square_share = tl.load(shares), tl.load(shares + 1)
    p = tl.load(master + i, mask=live, other=0.0)
    g = tl.load(gradient + i, mask=live, other=0.0) / divisor
    mean = tl.load(mean_of + i, mask=live, other=0.0)
    square = tl.load(square_of + i, mask=live, other=0.0)
    mean = beta1 * mean + (1 - beta1) * g
    square = beta2 * square + (1 - beta2) * g * g
    p = p * (1 - rate * decay)
    p -= rate / mean_share * mean / (tl.sqrt(square) / tl.sqrt(square_share) + eps)
    tl.store(master + i, p, mask=live)
    tl.store(mean_of + i, mean, mask=live)
    tl.store(square_of + i, square, mask=live)
    if HAS_COPY:
        tl.store(copy + i, p.to(copy.dtype.element_ty), mask=live)
