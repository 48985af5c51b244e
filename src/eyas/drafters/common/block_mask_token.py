"""Which token's embedding the empty slots of a block read."""

from collections.abc import Sequence
from typing import Any

from eyas.errors import UserError


def choose_mask_token(asked: int | None, tokenizer: Any, num_rows: int, eos_token_ids: Sequence[int]) -> int:
    """Return the id of the mask token: as asked, the tokenizer's, a spare row, padding, or end of turn.

    ``num_rows`` is V, the rows of the target's embedding. A spare row is the first one behind all tokens.
    A padding or end-of-turn token is as good: an empty slot is known by its place in the block, and no
    block is drafted behind the end of a turn.

    Raises: UserError when there is none of them, or the id has no row.
    """
    if asked is not None:
        return _with_row(asked, num_rows, f"draft.mask_token_id={asked}")
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


def _with_row(token: int, num_rows: int, what: str) -> int:
    if token >= num_rows:
        raise UserError(
            f"{what} has no row in the target's embedding of {num_rows} rows",
            hint=f"choose an id below {num_rows}, or leave draft.mask_token_id out",
        )
    return token
