"""Drafting tokens in this process: a chain, each token from the draft's own state of the one before."""

from collections.abc import Sequence

import torch

from eyas.drafters.common.attention import SequenceKeys
from eyas.drafters.eagle3.model import Eagle3Draft


class DraftChain:
    """A draft with the keys and values of one sequence's verified rows.

    Shapes: target_ids [W], the target's id of each draft id.
    """

    def __init__(self, draft: Eagle3Draft, target_ids: torch.Tensor) -> None:
        self.draft, self.target_ids = draft, target_ids
        self.verified = SequenceKeys(draft.config.sliding_window)

    def propose(self, aux: torch.Tensor, following: Sequence[int], num_draft_tokens: int) -> list[int]:
        """Take verified rows (aux [R, A, D], the token after each) and draft from the last of them."""
        draft, weight = self.draft, self.draft.fc.weight
        first, newest = self.verified.num_rows, slice(-1, None)
        tokens = torch.tensor(list(following), device=weight.device)
        positions = torch.arange(first, first + len(tokens), device=weight.device)
        hidden = draft.fuse(aux.to(weight.device, weight.dtype))
        hidden = draft(tokens, hidden, positions, self.verified, newest)

        position, keys = positions[newest], self.verified.fork()
        proposal: list[int] = []
        while True:
            proposal.append(int(self.target_ids[draft.logits(hidden)[0].argmax()]))
            if len(proposal) == num_draft_tokens:
                return proposal
            position = position + 1
            tokens = torch.tensor(proposal[-1:], device=weight.device)
            hidden = draft(tokens, draft.carry(hidden), position, keys)
