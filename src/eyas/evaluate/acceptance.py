"""Acceptance predicted offline, from stored states alone."""

from collections.abc import Sequence
from typing import Any

import torch

from eyas.drafters.base import Drafter
from eyas.drafters.common.acceptance import Acceptance, replay_answers
from eyas.store.base import StateReader
from eyas.targets.teacher import TeacherHead


@torch.no_grad()
def predict_acceptance(
    drafter: Drafter,
    draft: Any,
    teacher: TeacherHead,
    target_ids: torch.Tensor,
    states: StateReader,
    indices: Sequence[int],
    num_draft_tokens: int,
    max_new_tokens: int,
) -> list[Acceptance]:
    """Replay decoding of each sample's first answer: exact where the target wrote it greedily.

    ``target_ids`` [W] maps draft ids to target ids. An answer of one token takes no round.
    """
    found = []
    for index in indices:
        item = states.read(index)
        if not item.sample.supervised[item.sample.loss_mask.argmax()]:
            found.append(Acceptance.empty(num_draft_tokens))
            continue
        rounds = drafter.replay(draft, teacher, target_ids, item, num_draft_tokens)
        answers = replay_answers(rounds.rows, rounds.accepted, rounds.depth, num_draft_tokens, max_new_tokens)
        found.append(answers[0])
    return found
