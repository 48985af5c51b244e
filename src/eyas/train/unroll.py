"""The K-step unroll of the draft on its own hidden states (training-time test)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from eyas.draft.eagle3 import Eagle3Draft
from eyas.targets.teacher import TeacherHead
from eyas.train.attention import attend, document_bounds
from eyas.train.batch import PackedBatch
from eyas.train.loss import kl_sum
from eyas.train.teacher import teacher_targets


@dataclass(frozen=True)
class UnrollResult:
    """Sums over a batch; divide only after adding up batches and ranks.

    loss: the weighted KL sum (differentiable). num_supervised: rows of step 0. step_kl [K]: the
    unweighted KL sum of each step. accepted [R_0]: for each row, how many steps in a row the draft's
    argmax was the target's, and depth [R_0]: how many steps it could be judged for.
    """

    loss: torch.Tensor
    num_supervised: int
    step_kl: torch.Tensor
    accepted: torch.Tensor
    depth: torch.Tensor


def unroll(draft: Eagle3Draft, batch: PackedBatch) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (step, logits [R_k, W]) of the rows that the plan runs at each step."""
    plan = batch.plan
    hidden = draft.fuse(batch.aux[plan.keys])
    mixed = draft.mix(batch.tokens[plan.keys + 1], hidden)
    positions = batch.positions[plan.keys]
    first_keys = draft.keys_values(mixed, positions)
    key_documents = batch.documents[plan.keys]

    hidden, mixed, positions = (x[plan.key_places[0]] for x in (hidden, mixed, positions))
    own: list[tuple[torch.Tensor, torch.Tensor]] = []
    for k in range(plan.num_steps):
        if k:
            hidden, positions = hidden[plan.keep[k]], positions[plan.keep[k]] + 1
            own = [(keys[plan.keep[k]], values[plan.keep[k]]) for keys, values in own]
            mixed = draft.mix(batch.tokens[plan.rows[k] + 1 + k], hidden)
            own.append(draft.keys_values(mixed, positions))
        bounds = document_bounds(batch.documents[plan.rows[k]], key_documents)
        queries = draft.queries(mixed, positions)
        attended = attend(queries, plan.key_places[k], first_keys, own, bounds)
        hidden = draft.finish(attended, hidden)
        yield k, draft.logits(hidden)


def run_unroll(
    draft: Eagle3Draft,
    teacher: TeacherHead,
    target_ids: torch.Tensor,
    batch: PackedBatch,
    step_decay: float,
) -> UnrollResult:
    """Unroll the draft over a batch and hold each step to the teacher.

    ``target_ids`` [W] maps draft ids to target ids.
    """
    is_full = draft.config.vocab_size == draft.config.target_vocab_size
    targets = teacher_targets(teacher, batch.last, target_ids, is_full)
    num_rows = batch.num_supervised
    device = batch.tokens.device
    loss = torch.zeros((), device=device)
    step_kl = []
    accepted = torch.zeros(num_rows, dtype=torch.long, device=device)
    depth = torch.zeros_like(accepted)
    places = torch.arange(num_rows, device=device)  # rows of this step among the rows of step 0
    for k, logits in unroll(draft, batch):
        if k:
            places = places[batch.plan.keep[k]]
        index = batch.plan.teacher[k]
        kl = kl_sum(logits, targets.probabilities[index], targets.in_draft[index])
        loss = loss + step_decay**k * kl
        step_kl.append(kl.detach())
        with torch.no_grad():
            agrees = target_ids[logits.argmax(-1)] == targets.argmax[index]
            accepted[places] += agrees & (accepted[places] == k)
            depth[places] += 1
    return UnrollResult(loss, num_rows, torch.stack(step_kl), accepted, depth)
