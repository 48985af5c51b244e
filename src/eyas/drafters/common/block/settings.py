"""The settings that all kinds of block drafts share."""

from typing import Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from eyas.config.schema import DraftSettings


class BlockSettings(DraftSettings):
    """Shape, blocks and anchors of a block draft; its width, embedding and head are the target's."""

    num_layers: PositiveInt = Field(5, description="decoder layers")
    block_size: int = Field(16, ge=2, description="B, slots of a block; the first one reads the anchor token")
    num_anchors: PositiveInt = Field(
        64, description="blocks trained in each conversation, drawn anew whenever it is read"
    )
    causal: bool = Field(
        True, description="a slot sees the slots before it only; false: all slots of its block"
    )
    sliding_window: PositiveInt | None = Field(
        2048, description="tokens back that a slot sees, itself included, in every layer; null: all"
    )
    mask_token_id: NonNegativeInt | None = Field(
        None,
        description="id whose embedding the empty slots read; default: the tokenizer's mask token, else a "
        "spare row of the embedding, else its padding or end-of-turn token",
    )
    vocab_size: PositiveInt | None = Field(
        None, description="draft vocabulary W; null: all of the target's, which SGLang needs"
    )
    intermediate_size: PositiveInt | None = Field(None, description="width of the draft's MLP")
    num_attention_heads: PositiveInt | None = Field(None, description="query heads")
    num_key_value_heads: PositiveInt | None = Field(None, description="key/value heads")

    @model_validator(mode="after")
    def _window_holds_a_block(self) -> Self:
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError(
                f"draft.sliding_window={self.sliding_window} is less than "
                f"draft.block_size={self.block_size}; a slot must see its whole block"
            )
        return self
