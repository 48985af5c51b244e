"""Acceptance predicted offline, from stored states alone."""

from collections.abc import Sequence

import torch

from eyas.drafters.common.acceptance import Acceptance, replay_answers
from eyas.drafters.common.batch import pack_batch
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.drafters.eagle3.unroll import run_unroll
from eyas.store.base import StateReader
from eyas.targets.teacher import TeacherHead


@torch.no_grad()
def predict_acceptance(
    draft: Eagle3Draft,
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
        batch = pack_batch([item], num_draft_tokens, target_ids.device, draft.fc.weight.dtype)
        result = run_unroll(draft, teacher, target_ids, batch, step_decay=1.0)
        rows = batch.plan.rows[0]
        answers = replay_answers(rows, result.accepted, result.depth, num_draft_tokens, max_new_tokens)
        found.append(answers[0])
    return found
