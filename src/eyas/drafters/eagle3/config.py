"""The shape of a draft model, and where it comes from."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eyas.drafters.common.heads_and_rope import (
    draft_heads,
    draft_rope,
    latent_head_dim,
    latent_rope,
    latent_shape,
)
from eyas.errors import UserError
from eyas.types import TargetSpec


@dataclass(frozen=True)
class DraftConfig:
    """What it takes to build a draft; travels in checkpoints and becomes the export's config.json."""

    hidden_size: int
    target_hidden_size: int
    num_aux_layers: int
    vocab_size: int  # W
    target_vocab_size: int  # V
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: Mapping[str, Any]
    num_layers: int = 1
    # EAGLE-3.1: a norm for each aux layer before they are fused; steps read the normed output of the last.
    fc_norm: bool = False
    norm_output: bool = False
    # What published speculators drafts do, and no default makes: the lowest layer adds to the normed hidden
    # state; one norm of all aux layers side by side before they are fused.
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    # Tokens back that a row sees in every layer, itself included; None: all.
    sliding_window: int | None = None
    # Ranks and widths of attention over latents (MLA), named as in TargetSpec; None: grouped heads.
    latent_attention: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"draft.num_attention_heads={self.num_attention_heads} does not divide into "
                f"{self.num_key_value_heads} key/value heads",
                hint="choose draft.num_key_value_heads that divides draft.num_attention_heads",
            )

    @property
    def has_own_embedding(self) -> bool:
        """Whether the target's embedding is too wide or narrow to be shared."""
        return self.hidden_size != self.target_hidden_size

    @property
    def rotated_dim(self) -> int:
        """How much of a head turns with its position."""
        return self.head_dim if self.latent_attention is None else self.latent_attention["qk_rope_head_dim"]

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.latent_attention is None else self.latent_attention["v_head_dim"]

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "rope_parameters": dict(self.rope_parameters)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "DraftConfig":
        return cls(**value)


def draft_config_for(
    spec: TargetSpec,
    vocab_size: int,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    fc_norm: bool = False,
    norm_output: bool = False,
    hidden_size: int | None = None,
    num_layers: int = 1,
    attention: Literal["gqa", "mla"] = "gqa",
    sliding_window: int | None = None,
) -> DraftConfig:
    """Copy the target's shape where nothing else is asked for and it suits a draft.

    Raises: UserError when heads do not divide, the target has no latent attention to copy, or such attention
    is asked for with a window.
    """
    width = hidden_size or spec.hidden_size
    if attention == "mla" and sliding_window is not None:
        raise UserError(
            f"draft.sliding_window={sliding_window} is given for latent attention, which no engine serves so",
            hint="set draft.sliding_window=null, or draft.attention=gqa",
        )
    if attention == "mla":
        latent = latent_shape(spec, num_key_value_heads)
        heads = kv_heads = num_attention_heads or spec.num_attention_heads
        head_dim, rope = latent_head_dim(latent), latent_rope(spec.rope_parameters)
    else:
        latent, rope = None, draft_rope(spec.rope_parameters)
        heads, kv_heads, head_dim = draft_heads(spec, width, num_attention_heads, num_key_value_heads)
    mlp_width = intermediate_size or spec.intermediate_size * width // spec.hidden_size
    return DraftConfig(
        hidden_size=width,
        target_hidden_size=spec.hidden_size,
        num_aux_layers=spec.num_aux_layers,
        vocab_size=vocab_size,
        target_vocab_size=spec.vocab_size,
        intermediate_size=mlp_width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=spec.norm_eps,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters=rope,
        fc_norm=fc_norm,
        norm_output=norm_output,
        num_layers=num_layers,
        sliding_window=sliding_window,
        latent_attention=latent,
    )
