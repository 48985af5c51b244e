"""The kernels of the fused step in plain torch: the same functions, for the CPU and for comparison."""

import torch

from eyas.drafters.common.loss import LossKind, row_losses
from eyas.drafters.common.teacher_targets import TeacherTargets
from eyas.kernels.head_layout import Heads


def attend(
    queries: torch.Tensor,
    first_kv: torch.Tensor,
    own_kv: torch.Tensor,
    own_index: torch.Tensor,
    first: torch.Tensor,
    place: torch.Tensor,
    heads: Heads,
    out: torch.Tensor,
) -> torch.Tensor:
    """See ``attention_kernel.attend``; the log-sum-exp is not needed here."""
    out.copy_(_attend(queries, first_kv, own_kv, own_index, first, place, heads))
    return out.new_empty(0)


def attend_backward(
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    queries: torch.Tensor,
    first_kv: torch.Tensor,
    own_kv: torch.Tensor,
    own_index: torch.Tensor,
    first: torch.Tensor,
    place: torch.Tensor,
    heads: Heads,
    grad_first_kv: torch.Tensor,
    grad_own_kv: torch.Tensor,
) -> torch.Tensor:
    """See ``attention_backward_kernel.attend_backward``."""
    q, kv, own = (x.detach().requires_grad_(True) for x in (queries, first_kv, own_kv))
    with torch.enable_grad():
        result = _attend(q, kv, own, own_index, first, place, heads)
    grads = torch.autograd.grad(result, (q, kv, own), grad_out, materialize_grads=True)
    grad_first_kv += grads[1]
    grad_own_kv += grads[2]
    return grads[0]


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_rotated: int, out: torch.Tensor
) -> None:
    """See ``pointwise_kernel.rotate``."""
    per_head = x.unflatten(1, (-1, cos.shape[1]))
    turned, rest = per_head[:, :num_rotated].to(cos.dtype), per_head[:, num_rotated:]
    a, b = turned.chunk(2, dim=-1)
    turned = turned * cos[:, None] + torch.cat([-b, a], dim=-1) * sin[:, None]
    out.copy_(torch.cat([turned.to(out.dtype), rest.to(out.dtype)], dim=1).flatten(1))


def rms(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    index: torch.Tensor | None = None,
    copy: torch.Tensor | None = None,
) -> None:
    """See ``norm_kernel.rms``."""
    rows = x if index is None else x[index]
    wide = rows.float()
    out.copy_(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight)
    if copy is not None:
        copy.copy_(rows)


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
    """See ``norm_kernel.rms_backward``."""
    wide, grad = (x if index is None else x[index]).float(), grad.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed, inner = wide * scale, grad * weight
    of_weight = (grad * normed).sum(0)
    if out is not None:
        result = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        if residual is not None and residual_index is not None:
            result += residual[residual_index].masked_fill(residual_index[:, None] < 0, 0)
        elif residual is not None:
            result += residual
        out.copy_(result)
    return of_weight


def swiglu(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """See ``pointwise_kernel.swiglu``."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(gate * torch.sigmoid(gate) * up)


def swiglu_backward_(grad: torch.Tensor, gate_up: torch.Tensor) -> None:
    """See ``pointwise_kernel.swiglu_backward_``."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    share = torch.sigmoid(gate)
    of_gate = grad * up * share * (1 + gate * (1 - share))
    gate_up.copy_(torch.cat([of_gate, grad * gate * share], dim=-1))


def loss_and_gradient_(
    logits: torch.Tensor,
    targets: TeacherTargets,
    index: torch.Tensor,
    weight: float,
    kind: LossKind,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``loss_kernel.loss_and_gradient_``."""
    best = logits.argmax(-1)
    leaf = logits.detach().requires_grad_(with_gradient)
    with torch.set_grad_enabled(with_gradient):
        coverage = None if targets.coverage is None else targets.coverage[index]
        p, counts = targets.probabilities[index], targets.in_draft[index]
        values = row_losses(leaf, p, counts, coverage, kind)
    if with_gradient:
        (gradient,) = torch.autograd.grad(values, leaf, torch.ones_like(values))
        logits.copy_(weight * gradient)
    return values.detach(), best


def _attend(
    queries: torch.Tensor,
    first_kv: torch.Tensor,
    own_kv: torch.Tensor,
    own_index: torch.Tensor,
    first: torch.Tensor,
    place: torch.Tensor,
    heads: Heads,
) -> torch.Tensor:
    def split(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = kv.unflatten(-1, (2, heads.kv_heads, heads.head_dim)).unbind(-3)
        return keys.float(), values.float()

    q = queries.unflatten(1, (heads.kv_heads, heads.group, heads.head_dim)).float() * heads.head_dim**-0.5
    keys, values = split(first_kv)  # (M, kv heads, head_dim)
    own_keys, own_values = split(own_kv[own_index.long()])  # (R, own steps, kv heads, head_dim)
    key = torch.arange(len(keys), device=q.device)
    seen = (key >= first[:, None]) & (key <= place[:, None])  # (R, M)
    scores = torch.einsum("rhgd,mhd->rhgm", q, keys).masked_fill(~seen[:, None, None], float("-inf"))
    own_scores = torch.einsum("rhgd,rjhd->rhgj", q, own_keys)
    weights = torch.softmax(torch.cat([scores, own_scores], -1), -1)
    out = torch.einsum("rhgm,mhd->rhgd", weights[..., : len(keys)], values)
    out = out + torch.einsum("rhgj,rjhd->rhgd", weights[..., len(keys) :], own_values)
    return out.flatten(1).to(queries.dtype)
