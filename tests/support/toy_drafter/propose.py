"""Drafting with a toy: no cache, for each row stands for itself."""

from collections.abc import Sequence

import torch

from toy_drafter.model import ToyDraft


class ToyProposer:
    def __init__(self, draft: ToyDraft, target_ids: torch.Tensor) -> None:
        self.draft, self.target_ids = draft, target_ids

    def propose(self, aux: torch.Tensor, following: Sequence[int], num_draft_tokens: int) -> list[int]:
        logits = self.draft(aux[-1:], torch.tensor(following[-1:]))[0, :num_draft_tokens]
        ids: list[int] = self.target_ids[logits.argmax(-1)].tolist()
        return ids
