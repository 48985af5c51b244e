"""The shape of a block draft, and where it comes from."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from eyas.drafters.common.block.settings import BlockSettings
from eyas.drafters.common.heads_and_rope import draft_heads, draft_rope
from eyas.errors import UserError
from eyas.types import TargetSpec

# Aux layers that a block draft reads by default.
NUM_AUX_LAYERS = 5


@dataclass(frozen=True)
class BlockConfig:
    """All it takes to build a block draft. A block has B slots at the positions a .. a + B - 1.

    Slot 0 reads the anchor token x_a, the others the mask token. Prediction j (0-based) is token
    x_(a+1+j); slot ``first_slot`` + j makes it, so a block makes ``num_predictions`` of them.
    """

    first_slot: ClassVar[int]

    hidden_size: int
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
    num_layers: int
    block_size: int
    mask_token_id: int | None  # None until the target's tokenizer has been asked
    causal: bool
    sliding_window: int | None
    logit_scale: float = 1.0  # of the target's head, which the draft shares

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"draft.num_attention_heads={self.num_attention_heads} does not divide into "
                f"{self.num_key_value_heads} key/value heads",
                hint="choose draft.num_key_value_heads that divides draft.num_attention_heads",
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.target_vocab_size:
            raise UserError(
                f"draft.mask_token_id={self.mask_token_id} has no row in the target's embedding of "
                f"{self.target_vocab_size} rows",
                hint=f"choose an id below {self.target_vocab_size}, or leave draft.mask_token_id out",
            )
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise UserError(
                f"a window of {self.sliding_window} tokens does not hold a block of {self.block_size} slots",
                hint="set draft.sliding_window to at least draft.block_size",
            )

    @property
    def target_hidden_size(self) -> int:
        """The target's width, which is the draft's: embedding and head are shared."""
        return self.hidden_size

    @property
    def has_own_embedding(self) -> bool:
        return False

    @property
    def has_full_vocabulary(self) -> bool:
        return self.vocab_size == self.target_vocab_size

    @property
    def latent_attention(self) -> None:
        """Block drafts have grouped heads."""
        return None

    @property
    def rotated_dim(self) -> int:
        """How much of a head turns with its position."""
        return self.head_dim

    @property
    def num_predictions(self) -> int:
        """Tokens that one block drafts at most."""
        return self.block_size - self.first_slot

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "rope_parameters": dict(self.rope_parameters)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(**value)


def shape_for(spec: TargetSpec, settings: BlockSettings, vocab_size: int) -> dict[str, Any]:
    """Return the fields of a BlockConfig, the target's where nothing else is asked for and it suits.

    Raises: UserError when heads do not divide.
    """
    heads, kv_heads, head_dim = draft_heads(
        spec, spec.hidden_size, settings.num_attention_heads, settings.num_key_value_heads
    )
    return {
        "hidden_size": spec.hidden_size,
        "num_aux_layers": spec.num_aux_layers,
        "vocab_size": vocab_size,
        "target_vocab_size": spec.vocab_size,
        "intermediate_size": settings.intermediate_size or spec.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_parameters": draft_rope(spec.rope_parameters),
        "num_layers": settings.num_layers,
        "block_size": settings.block_size,
        "mask_token_id": settings.mask_token_id,
        "causal": settings.causal,
        "sliding_window": settings.sliding_window,
        "logit_scale": spec.logit_scale,
    }


def default_block_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Return five layers spread evenly from the second one to the last but two, as ids L after L layers.

    z-lab's rule is in "output of layer i": i runs from 1 to num_layers - 3. Shallow targets have fewer.
    """
    first, last = 1, max(1, num_layers - 3)
    step = (last - first) / (NUM_AUX_LAYERS - 1)
    outputs_of = {round(first + i * step) for i in range(NUM_AUX_LAYERS)}
    return tuple(sorted(min(i + 1, num_layers) for i in outputs_of))
