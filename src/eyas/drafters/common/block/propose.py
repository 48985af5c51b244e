"""Drafting one block in this process, with the cache that serving would have."""

from collections.abc import Sequence

import torch

from eyas.drafters.common.block.attention import BlockPlaces, PlainBlockAttention
from eyas.drafters.common.block.model import BlockDraft
from eyas.errors import UserError


class BlockProposer:
    """The draft with its layers' keys and values of the context, for one sequence.

    ``target_ids`` [W] maps draft ids to target ids.
    """

    def __init__(self, draft: BlockDraft, target_ids: torch.Tensor) -> None:
        self.draft, self.target_ids = draft, target_ids
        config, like = draft.config, draft.fc.weight
        empty = like.new_empty(0, config.num_key_value_heads, config.head_dim)
        self.cache = [(empty, empty) for _ in range(config.num_layers)]

    def propose(self, aux: torch.Tensor, following: Sequence[int], num_draft_tokens: int) -> list[int]:
        """Take verified rows (aux [R, A, D], the token after each) and draft a block behind the last token.

        A block is computed whole: fewer draft tokens are its first ones.
        Raises: UserError when the block holds fewer.
        """
        draft, weight = self.draft, self.draft.fc.weight
        check_num_draft_tokens(draft.config.num_predictions, num_draft_tokens)
        seen = len(self.cache[0][0])
        anchor_position = seen + len(aux)
        positions = torch.arange(seen, anchor_position, device=weight.device)
        new = draft.context(aux.to(weight.device, weight.dtype), positions)
        self.cache = [
            (torch.cat([keys, new_keys]), torch.cat([values, new_values]))
            for (keys, values), (new_keys, new_values) in zip(self.cache, new, strict=True)
        ]
        anchor = torch.tensor([following[-1]], device=weight.device)
        places = BlockPlaces.of_sequence(anchor_position, anchor_position, weight.device)
        attend = PlainBlockAttention(draft.config, places)
        normed = draft(anchor, places.anchor_positions, self.cache, attend)[0]
        return draft.choose(normed[:num_draft_tokens], int(following[-1]), self.target_ids)


def check_num_draft_tokens(num_predictions: int, num_draft_tokens: int) -> None:
    """Raises: UserError when a block has fewer predictions."""
    if num_draft_tokens > num_predictions:
        raise UserError(
            f"the draft's block holds {num_predictions} draft tokens, {num_draft_tokens} were asked for",
            hint=f"ask for {num_predictions} at most",
        )
