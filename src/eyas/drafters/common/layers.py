"""The parts drafts are built of: RMSNorm, rotary positions, attention weights, SwiGLU."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class LayerConfig(Protocol):
    """What these parts read of a draft's configuration."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rotated_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def target_vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def rope_parameters(self) -> Mapping[str, Any]: ...
    @property
    def latent_attention(self) -> Mapping[str, int] | None: ...


def start_std(width: int) -> float:
    """Return the standard deviation of matrices that start as noise.

    Attention scores of normed rows grow with its square times the width. So above width 576 it falls with the
    root of the width, and scores start alike at all of these widths.
    """
    return 0.02 * min(1.0, math.sqrt(576 / width))


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Rotary(nn.Module):
    """Rotary embedding with the target's own parameters, computed by transformers (all its scalings)."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.embedding = LlamaRotaryEmbedding(llama_config(config))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate x [R, heads, rotated_dim] to ``positions`` [R]."""
        cos, sin = self.embedding(x, positions[None])  # (1, R, rotated_dim)
        cos, sin = cos[0, :, None], sin[0, :, None]
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """The four projections; queries, keys and values read ``input_width``. Scores live elsewhere."""

    def __init__(self, config: LayerConfig, input_width: int) -> None:
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(input_width, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(input_width, config.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(input_width, config.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, width, bias=False)

    def queries(self, x: torch.Tensor, rotary: Rotary, positions: torch.Tensor) -> torch.Tensor:
        """Return rotated queries [R, heads, head_dim]."""
        return rotary(self.heads(self.q_proj(x)), positions)

    def keys_values(
        self, x: torch.Tensor, rotary: Rotary, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotated keys and values [R, kv heads, head_dim]."""
        return rotary(self.heads(self.k_proj(x)), positions), self.heads(self.v_proj(x))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """Split [R, heads * head_dim] into [R, heads, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """SwiGLU, as in Llama."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def llama_config(config: LayerConfig) -> LlamaConfig:
    """Return the transformers configuration of the same shape."""
    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.rotated_dim,
        rms_norm_eps=config.rms_norm_eps,
        vocab_size=config.target_vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
        tie_word_embeddings=False,
    )
