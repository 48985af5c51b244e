"""Multi-head latent attention (MLA): keys and values out of a low rank, positions in a part of each head.

Training expands keys and values from the latent; an engine caches the latent, which is the same function.
Source: DeepSeek-V2, arXiv 2405.04434; names and scale of vLLM's ``deepseek_v2.py``.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from eyas.drafters.common.layers import LayerConfig, RMSNorm, Rotary


class LatentAttention(nn.Module):
    """The projections and norms; all read ``input_width``. Scores live elsewhere."""

    def __init__(self, config: LayerConfig, input_width: int) -> None:
        super().__init__()
        assert config.latent_attention is not None
        shape, heads, eps = config.latent_attention, config.num_attention_heads, config.rms_norm_eps
        self.num_heads, self.rank, query_rank = heads, shape["kv_lora_rank"], shape["q_lora_rank"]
        self.plain, self.turned = shape["qk_nope_head_dim"], shape["qk_rope_head_dim"]
        value = shape["v_head_dim"]
        self.q_a_proj = nn.Linear(input_width, query_rank, bias=False)
        self.q_a_layernorm = RMSNorm(query_rank, eps)
        self.q_b_proj = nn.Linear(query_rank, heads * config.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(input_width, self.rank + self.turned, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, eps)
        self.kv_b_proj = nn.Linear(self.rank, heads * (self.plain + value), bias=False)
        self.o_proj = nn.Linear(heads * value, config.hidden_size, bias=False)
        self.sharpness = sharpness(config.rope_parameters)

    def queries(self, x: torch.Tensor, rotary: Rotary, positions: torch.Tensor) -> torch.Tensor:
        """Return queries [R, heads, head_dim] whose scores with the keys want head_dim ** -0.5 alone."""
        flat = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        plain, turned = flat.unflatten(-1, (self.num_heads, -1)).split([self.plain, self.turned], -1)
        return torch.cat([plain, rotary(_halves(turned), positions)], -1) * self.sharpness

    def keys_values(
        self, x: torch.Tensor, rotary: Rotary, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [R, heads, head_dim], their turned part shared, and values [R, heads, v_head_dim]."""
        latent, turned = self.kv_a_proj_with_mqa(x).split([self.rank, self.turned], -1)
        flat = self.kv_b_proj(self.kv_a_layernorm(latent))
        plain, values = flat.unflatten(-1, (self.num_heads, -1)).tensor_split([self.plain], -1)
        shared = rotary(_halves(turned[:, None]), positions).expand(-1, self.num_heads, -1)
        return torch.cat([plain, shared], -1), values


def sharpness(rope: Mapping[str, Any]) -> float:
    """Return what DeepSeek's YaRN multiplies scores by beside the rotation: mscale_all_dim's, squared."""
    factor = rope.get("factor", 1.0) if rope["rope_type"] == "yarn" else 1.0
    if factor <= 1:
        return 1.0
    return float((0.1 * rope["mscale_all_dim"] * math.log(factor) + 1.0) ** 2)


def _halves(x: torch.Tensor) -> torch.Tensor:
    """Put pairs of neighbours, which this attention turns, half a head apart; scores do not change by it."""
    return torch.cat([x[..., ::2], x[..., 1::2]], -1)
