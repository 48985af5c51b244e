"""The norms of the fused step and their gradients: plain functions, compiled into one pass each on a GPU."""

import torch
from torch.nn import functional as F


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rms_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x (in its dtype) and of the weight (fp32)."""
    wide, grad_wide = x.float(), grad.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = wide * scale
    inner = grad_wide * weight
    grad_x = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), (grad_wide * normed).sum(0)


def mix(
    embedding: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    token_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Return the layer's input [R, 2D]: the normed embedding of ``tokens`` beside the normed ``hidden``."""
    embedded = embedding[tokens].to(hidden.dtype)
    return torch.cat([rms(embedded, token_weight, eps), rms(hidden, hidden_weight, eps)], dim=-1)


def mix_backward(
    grad: torch.Tensor,
    residual: torch.Tensor,
    embedding: torch.Tensor,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    token_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``hidden`` (with ``residual`` added), token weight and hidden weight."""
    of_token, of_hidden = grad.chunk(2, dim=-1)
    embedded = embedding[tokens].to(hidden.dtype)
    _, grad_token_weight = rms_backward(of_token, embedded, token_weight, eps)
    grad_hidden, grad_hidden_weight = rms_backward(of_hidden, hidden, hidden_weight, eps)
    return grad_hidden + residual, grad_token_weight, grad_hidden_weight


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
