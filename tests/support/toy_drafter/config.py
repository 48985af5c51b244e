"""The shape of a toy draft."""

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToyConfig:
    hidden_size: int
    target_hidden_size: int
    num_aux_layers: int
    vocab_size: int
    target_vocab_size: int
    num_tokens: int
    has_own_embedding: bool = False
    sliding_window: int | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
