"""Which token's embedding the empty slots of a block read."""

from collections.abc import Sequence
from typing import Any

from eyas.errors import UserError


def choose_mask_token(tokenizer: Any, num_rows: int, eos_token_ids: Sequence[int]) -> int:
    """Return the id of the mask token: the tokenizer's, a spare row, padding, or the end of a turn.

    ``num_rows`` is V, the rows of the target's embedding; ``tokenizer`` may be None. A spare row is the first
    one after all tokens. A padding or end-of-turn token is as good: an empty slot is known by its position in
    the block, and no block is drafted after the end of a turn.

    Raises: UserError when the target has none of them.
    """
    found = getattr(tokenizer, "mask_token_id", None)
    if found is not None and found < num_rows:
        return int(found)
    if tokenizer is not None and len(tokenizer) < num_rows:
        return len(tokenizer)
    padding = getattr(tokenizer, "pad_token_id", None)
    for token in (padding, *eos_token_ids):
        if token is not None and token < num_rows:
            return int(token)
    raise UserError(
        "the target has no mask token, no spare row in its embedding, no padding and no end-of-turn token",
        hint=f"set draft.mask_token_id to an id below {num_rows} that no answer holds",
    )
