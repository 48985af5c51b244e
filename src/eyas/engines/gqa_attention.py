"""Attention for one-token decoding with grouped heads, without copying keys and values for every head.

transformers repeats the cached keys and values to all query heads whenever there is a mask, which
costs more than the attention itself when many sequences are decoded on a CPU. Longer inputs go to
its own implementation, so only single-token steps come through here.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "eyas_grouped"


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Switch a model that would use sdpa; any other choice (soft-caps, sinks) is the model's own need."""
    if model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from query [B, heads, 1, head_dim] to key and value [B, kv heads, T, head_dim].

    Values may be of another width, as DeepSeek's are.
    """
    batch, num_heads, num_queries, head_dim = query.shape
    if num_queries != 1 or any(options.get(name) is not None for name in ("softcap", "s_aux")):
        out = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return out[0], None
    num_kv = key.shape[1]
    scale = head_dim**-0.5 if scaling is None else scaling
    grouped = query.view(batch, num_kv, num_heads // num_kv, head_dim) * scale
    scores = grouped @ key.transpose(2, 3)  # (B, kv heads, group, T)
    if attention_mask is not None:
        # (B, 1, 1, T): one query, so the group axis can stand in for the query axis.
        is_bool = attention_mask.dtype == torch.bool
        scores = scores.masked_fill(~attention_mask, float("-inf")) if is_bool else scores + attention_mask
    attended = torch.softmax(scores.float(), dim=-1).to(value.dtype) @ value
    return attended.reshape(batch, 1, num_heads, value.shape[-1]), None
