"""Acceptance predicted offline, from stored states alone."""

from collections.abc import Sequence
from typing import Any

import torch

from eyas.drafters.base import Drafter
from eyas.drafters.common.acceptance import Acceptance, answers_of, replay_rounds
from eyas.store.base import StateReader
from eyas.targets.teacher import TeacherHead


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
    """Count the rounds of each sample that ``predict_rounds`` predicts."""
    found = predict_rounds(
        drafter, draft, teacher, target_ids, states, indices, num_draft_tokens, max_new_tokens
    )
    return [Acceptance.of(rounds, num_draft_tokens) for rounds in found]


@torch.no_grad()
def predict_rounds(
    drafter: Drafter,
    draft: Any,
    teacher: TeacherHead,
    target_ids: torch.Tensor,
    states: StateReader,
    indices: Sequence[int],
    num_draft_tokens: int,
    max_new_tokens: int,
) -> list[list[int]]:
    """Replay decoding of each sample's first answer: exact where the target wrote it greedily.

    Returned are the draft tokens accepted in each of its rounds.
    ``target_ids`` [W] maps draft ids to target ids. An answer of one token takes no round.
    """
    found: list[list[int]] = []
    for index in indices:
        item = states.read(index)
        if not item.sample.supervised[item.sample.loss_mask.argmax()]:
            found.append([])
            continue
        rounds = drafter.replay(draft, teacher, target_ids, item, num_draft_tokens)
        accepted, depth = answers_of(rounds.rows, rounds.accepted, rounds.depth)[0]
        found.append(replay_rounds(accepted, depth, num_draft_tokens, max_new_tokens))
    return found
