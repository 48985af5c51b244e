"""What a row of a source becomes."""

from dataclasses import dataclass

import numpy as np

from eyas.types import Conversation


@dataclass(frozen=True)
class RenderedText:
    """A conversation that was already rendered with some chat template."""

    conversation_id: str
    text: str
    source: str


@dataclass(frozen=True)
class TokenRow:
    """Tokens and mask that the data brings along: [T] each, as they came."""

    conversation_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    source: str


Record = Conversation | RenderedText | TokenRow
