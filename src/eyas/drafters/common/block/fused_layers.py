"""The backbone of block drafts by kernels: what ``BlockDraft`` computes, with fewer passes and less kept.

A norm keeps its input, an MLP its input, gate and up; all else is computed again in the backward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch

from eyas.drafters.common.block.model import BlockAttend, BlockAttention, BlockDraft, KeysValues
from eyas.drafters.common.layers import MLP, RMSNorm, Rotary
from eyas.kernels.head_norm_kernel import norm_rotate, norm_rotate_backward
from eyas.kernels.norm_kernel import rms, rms_backward
from eyas.kernels.pointwise_kernel import swiglu, swiglu_backward_

# Cosines and sines [R, head_dim] of rows' positions, fp32.
Turns = tuple[torch.Tensor, torch.Tensor]


def fused_context(draft: BlockDraft, aux: torch.Tensor, positions: torch.Tensor) -> list[KeysValues]:
    """Return what ``draft.context`` does."""
    turns = _turns(draft.rotary, positions)
    fused, _ = _norm(draft.hidden_norm, draft.fc(aux.flatten(1)))
    attentions = [draft.layer(i).self_attn for i in range(draft.config.num_layers)]
    return [_keys_values(attention, fused, turns) for attention in attentions]


def fused_blocks(
    draft: BlockDraft,
    anchor_tokens: torch.Tensor,
    anchor_positions: torch.Tensor,
    context: Sequence[KeysValues],
    attend: BlockAttend,
) -> torch.Tensor:
    """Return what ``draft.forward`` does."""
    tokens, positions = draft.slots(anchor_tokens, anchor_positions)
    turns = _turns(draft.rotary, positions)
    hidden = draft.embed_tokens(tokens).to(draft.fc.weight.dtype)
    for number, keys_values in enumerate(context):
        layer = draft.layer(number)
        attention = layer.self_attn
        x, hidden = _norm(layer.input_layernorm, hidden)
        queries = _turned_heads(attention.q_norm, attention.q_proj(x), turns)
        attended = attend(queries, keys_values, _keys_values(attention, x, turns))
        hidden = hidden + attention.o_proj(attended.flatten(1))
        x, hidden = _norm(layer.post_attention_layernorm, hidden)
        hidden = hidden + _mlp(layer.mlp, x)
    blocks = hidden.unflatten(0, (-1, draft.config.block_size))[:, draft.config.first_slot :]
    out: torch.Tensor = draft.norm(blocks)
    return out


def _keys_values(attention: BlockAttention, x: torch.Tensor, turns: Turns) -> KeysValues:
    keys = _turned_heads(attention.k_norm, attention.k_proj(x), turns)
    return keys, attention.v_proj(x).unflatten(-1, (-1, attention.head_dim))


def _turns(rotary: Rotary, positions: torch.Tensor) -> Turns:
    in_fp32 = torch.empty(0, device=positions.device)
    cos, sin = rotary.embedding(in_fp32, positions[None])
    return cos[0].contiguous(), sin[0].contiguous()


def _norm(norm: RMSNorm, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normed rows and the rows themselves, to be read further on: their gradients meet here."""
    out: tuple[torch.Tensor, torch.Tensor] = _Norm.apply(x, norm.weight, norm.eps)
    return out


def _turned_heads(norm: RMSNorm, x: torch.Tensor, turns: Turns) -> torch.Tensor:
    out: torch.Tensor = _TurnedHeads.apply(x, norm.weight, norm.eps, *turns)
    return out.unflatten(-1, (-1, len(norm.weight)))


def _mlp(mlp: MLP, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _Mlp.apply(x, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
    return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        out = torch.empty_like(x)
        if len(x):
            rms(x, weight, eps, out)
        return out, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, of_rows: torch.Tensor | None) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        out = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        residual = None if of_rows is None else of_rows.contiguous()
        of_weight = rms_backward(grad.contiguous(), x, weight, ctx.eps, residual=residual, out=out)
        return out, of_weight.to(weight.dtype), None


class _TurnedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        return norm_rotate(x, weight, eps, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        of_x, of_weight = norm_rotate_backward(grad.contiguous(), x, weight, ctx.eps, cos, sin)
        return of_x, of_weight.to(weight.dtype), None, None, None


class _Mlp(torch.autograd.Function):
    """The gradients of gate and up are written over gate and up, so there is one backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        width = len(gate)
        gate_up = x.new_empty(len(x), 2 * width)
        torch.mm(x, gate.T, out=gate_up[:, :width])
        torch.mm(x, up.T, out=gate_up[:, width:])
        ctx.save_for_backward(x, gate_up, gate, up, down)
        return _opened(gate_up) @ down.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, gate_up, gate, up, down = ctx.saved_tensors
        width = len(gate)
        of_down = grad.T @ _opened(gate_up)
        swiglu_backward_(grad @ down, gate_up)
        of_gate, of_up = gate_up[:, :width], gate_up[:, width:]
        of_x = torch.addmm(of_gate @ gate, of_up, up)
        return of_x, of_gate.T @ x, of_up.T @ x, of_down


def _opened(gate_up: torch.Tensor) -> torch.Tensor:
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    swiglu(gate_up, out)
    return out
