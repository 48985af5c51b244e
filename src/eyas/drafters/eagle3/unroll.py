"""The unroll of the draft on its own hidden states for S steps (training-time test)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from eyas.drafters.common.attention import PackedKeys
from eyas.drafters.common.batch import PackedBatch
from eyas.drafters.common.loss import LossKind, row_losses
from eyas.drafters.common.recompute import again
from eyas.drafters.common.teacher_targets import teacher_targets
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.drafters.eagle3.ttt_rows import RowPlan
from eyas.targets.teacher import TeacherHead


@dataclass(frozen=True)
class UnrollResult:
    """Sums over a batch; divide only after adding up batches and ranks.

    loss: the weighted sum (differentiable). num_supervised: rows of step 0. step_loss [S]: the
    unweighted sum of each step. accepted [R_0]: for each row, how many steps in a row the draft's
    argmax was the target's, and depth [R_0]: how many steps it could be judged for.
    """

    loss: torch.Tensor
    num_supervised: int
    step_loss: torch.Tensor
    accepted: torch.Tensor
    depth: torch.Tensor


def unroll(
    draft: Eagle3Draft, batch: PackedBatch[RowPlan], recompute: bool = False
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (step, hidden states [R_s, D]) of the rows that the plan runs at each step: what logits read.

    A row's states of one layer are its keys in the next, so at step 0 every row runs all layers but the
    last, of which it needs no more than the keys: the row plan saves most for drafts of one layer.
    """
    plan = batch.plan
    attend = PackedKeys(batch.documents[plan.keys], draft.config.sliding_window)
    hidden, positions = draft.fuse(batch.aux[plan.keys]), batch.positions[plan.keys]
    for step in range(plan.num_steps):
        if step == 0:
            attend.begin(plan.key_places[0])
            tokens, wanted = batch.tokens[plan.keys + 1], plan.key_places[0]
            hidden = draft(tokens, hidden, positions, attend, wanted, recompute)
            positions = positions[wanted]
        else:
            kept = plan.keep[step]
            hidden, positions = draft.carry(hidden)[kept], positions[kept] + 1
            attend.begin(plan.key_places[step], kept)
            tokens = batch.tokens[plan.rows[step] + 1 + step]
            hidden = draft(tokens, hidden, positions, attend, None, recompute)
        yield step, hidden


def run_unroll(
    draft: Eagle3Draft,
    teacher: TeacherHead,
    target_ids: torch.Tensor,
    batch: PackedBatch[RowPlan],
    step_decay: float,
    loss_kind: LossKind = "kl",
    recompute: bool = False,
) -> UnrollResult:
    """Unroll the draft over a batch and hold each step to the teacher.

    ``target_ids`` [W] maps draft ids to target ids. With ``recompute`` the backward pass computes the MLP
    and the logits again.
    """
    is_full = draft.config.vocab_size == draft.config.target_vocab_size
    targets = teacher_targets(teacher, batch.last, target_ids, is_full, loss_kind != "kl")
    loss = torch.zeros((), device=batch.tokens.device)
    step_loss, agrees = [], []

    def hold(hidden: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss of rows and the draft's argmax of each."""
        logits = draft.logits(hidden)
        p, counts = targets.probabilities[index], targets.in_draft[index]
        coverage = None if targets.coverage is None else targets.coverage[index]
        one = row_losses(logits, p, counts, coverage, loss_kind).sum()
        return one, logits.argmax(-1)

    for step, hidden in unroll(draft, batch, recompute):
        index = batch.plan.teacher[step]
        one, best = again(hold, hidden, index) if recompute else hold(hidden, index)
        loss = loss + step_decay**step * one
        step_loss.append(one.detach())
        agrees.append(target_ids[best] == targets.argmax[index])
    accepted, depth = count_accepted(batch.plan, agrees)
    return UnrollResult(loss, batch.num_supervised, torch.stack(step_loss), accepted, depth)


def count_accepted(plan: RowPlan, agrees: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn each step's agreement [R_k] into ``accepted`` and ``depth`` of the rows of step 0."""
    places = torch.arange(len(plan.rows[0]), device=plan.rows[0].device)  # among the rows of step 0
    accepted, depth = torch.zeros_like(places), torch.zeros_like(places)
    for k, agree in enumerate(agrees):
        if k:
            places = places[plan.keep[k]]
        accepted[places] += agree & (accepted[places] == k)
        depth[places] += 1
    return accepted, depth
