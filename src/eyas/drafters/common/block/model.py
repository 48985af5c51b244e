"""The backbone of block drafts: Qwen3-like layers that attend to the target's projected states.

Parameter names are those that vLLM and SGLang load. Source: the layout of
vLLM's ``DFlashQwen3ForCausalLM``. Context rows pass no layer: their keys and values are projections of
one fused state, with the same weights as those of the block's slots.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from eyas.drafters.common.block.config import BlockConfig
from eyas.drafters.common.layers import MLP, RMSNorm, Rotary, start_std

KeysValues = tuple[torch.Tensor, torch.Tensor]


class BlockAttend(Protocol):
    """Attention of all slots of n blocks to their context and their own block."""

    def __call__(self, queries: torch.Tensor, context: KeysValues, own: KeysValues) -> torch.Tensor:
        """Return [n B, heads, head_dim]. Shapes: queries [n B, heads, head_dim]; context keys and values
        [N, kv heads, head_dim]; own [n B, kv heads, head_dim]."""


class BlockAttention(nn.Module):
    """The projections, with a norm for each head of queries and keys. Scores live elsewhere."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        width, head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, width, bias=False)
        self.q_norm = RMSNorm(head_dim, eps)
        self.k_norm = RMSNorm(head_dim, eps)

    def queries(self, x: torch.Tensor, rotary: Rotary, positions: torch.Tensor) -> torch.Tensor:
        """Return normed and rotated queries [M, heads, head_dim]."""
        return rotary(self.q_norm(self._heads(self.q_proj(x))), positions)

    def keys_values(self, x: torch.Tensor, rotary: Rotary, positions: torch.Tensor) -> KeysValues:
        """Return normed and rotated keys, and values, [M, kv heads, head_dim]."""
        keys = rotary(self.k_norm(self._heads(self.k_proj(x))), positions)
        return keys, self._heads(self.v_proj(x))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class BlockLayer(nn.Module):
    """One decoder layer; ``finish`` is what comes after attention."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(config)

    def finish(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Add attention's output [M, heads, head_dim] and the MLP to the residual ``hidden`` [M, D]."""
        hidden = hidden + self.self_attn.o_proj(attended.flatten(1))
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class BlockDraft(nn.Module):
    """``embed_tokens`` [V, D] and ``lm_head`` [W, D] are the target's and frozen; ``share`` sets them."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.target_vocab_size, width)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        for frozen in (self.embed_tokens, self.lm_head):
            frozen.weight.requires_grad_(False)
        self.fc = nn.Linear(config.num_aux_layers * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList([BlockLayer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.rotary = Rotary(config)

    def layer(self, number: int) -> BlockLayer:
        layer = self.layers[number]
        assert isinstance(layer, BlockLayer)
        return layer

    def context(self, aux: torch.Tensor, positions: torch.Tensor) -> list[KeysValues]:
        """Return each layer's keys and values of context rows; aux [N, A, D], positions [N]."""
        fused = self.hidden_norm(self.fc(aux.flatten(1)))
        return [
            self.layer(i).self_attn.keys_values(fused, self.rotary, positions)
            for i in range(self.config.num_layers)
        ]

    def slots(self, anchor_tokens: torch.Tensor, anchor_positions: torch.Tensor) -> KeysValues:
        """Return the tokens that the slots of blocks read, and their positions, [n B]; inputs [n]."""
        size, mask = self.config.block_size, self.config.mask_token_id
        assert mask is not None, "the target's tokenizer has not been asked"
        tokens = torch.full((len(anchor_tokens), size), mask, device=anchor_tokens.device)
        tokens[:, 0] = anchor_tokens
        places = torch.arange(size, device=anchor_positions.device)
        return tokens.flatten(), (anchor_positions[:, None] + places).flatten()

    def forward(
        self,
        anchor_tokens: torch.Tensor,
        anchor_positions: torch.Tensor,
        context: Sequence[KeysValues],
        attend: BlockAttend,
    ) -> torch.Tensor:
        """Return the normed hidden states [n, K, D] of the slots that predict.

        Shapes: anchor_tokens, anchor_positions [n]; ``context`` is what the method of this name returns.
        """
        tokens, positions = self.slots(anchor_tokens, anchor_positions)
        hidden = self.embed_tokens(tokens).to(self.fc.weight.dtype)
        for number, keys_values in enumerate(context):
            layer = self.layer(number)
            x = layer.input_layernorm(hidden)
            queries = layer.self_attn.queries(x, self.rotary, positions)
            own = layer.self_attn.keys_values(x, self.rotary, positions)
            hidden = layer.finish(attend(queries, keys_values, own), hidden)
        blocks = hidden.unflatten(0, (-1, self.config.block_size))[:, self.config.first_slot :]
        out: torch.Tensor = self.norm(blocks)
        return out

    def block_logits(self, normed: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., W] of predictions.

        Shapes: normed [..., D] hidden states; previous [...], the token before each one that is predicted.
        """
        out: torch.Tensor = self.lm_head(normed) * self.config.logit_scale
        return out

    def bias_parts(self, previous: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the factors [..., r] and [W, r] of what is added to the head's logits, if anything is."""
        return None, None

    def choose(self, normed: torch.Tensor, anchor_token: int, target_ids: torch.Tensor) -> list[int]:
        """Return the likeliest target ids of one block's predictions; normed [K, D], target_ids [W]."""
        anchor = torch.full((len(normed),), anchor_token, device=normed.device)
        best: list[int] = target_ids[self.block_logits(normed, anchor).argmax(-1)].tolist()
        return best

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that training changes, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def share(self, embedding: torch.Tensor, head_rows: torch.Tensor) -> None:
        """Take the target's embedding [V, D] and its head's rows of the draft vocabulary [W, D]."""
        self.embed_tokens.weight.copy_(embedding)
        self.lm_head.weight.copy_(head_rows)

    @torch.no_grad()
    def start(self, norm_weight: torch.Tensor, seed: int) -> None:
        """Start as noise, with the target's final norm [D] in front of its head."""
        std = start_std(self.config.hidden_size)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.trainable().values():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        self.norm.weight.copy_(norm_weight)
