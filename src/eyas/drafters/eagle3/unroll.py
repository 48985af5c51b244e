"""The K-step unroll of the draft on its own hidden states (training-time test)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from eyas.drafters.common.attention import attend, document_bounds
from eyas.drafters.common.batch import PackedBatch
from eyas.drafters.common.loss import LossKind, row_losses
from eyas.drafters.common.teacher_targets import teacher_targets
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.drafters.eagle3.ttt_rows import RowPlan
from eyas.targets.teacher import TeacherHead


@dataclass(frozen=True)
class UnrollResult:
    """Sums over a batch; divide only after adding up batches and ranks.

    loss: the weighted sum (differentiable). num_supervised: rows of step 0. step_loss [K]: the
    unweighted sum of each step. accepted [R_0]: for each row, how many steps in a row the draft's
    argmax was the target's, and depth [R_0]: how many steps it could be judged for.
    """

    loss: torch.Tensor
    num_supervised: int
    step_loss: torch.Tensor
    accepted: torch.Tensor
    depth: torch.Tensor


def unroll(
    draft: Eagle3Draft, batch: PackedBatch, recompute: bool = False
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (step, hidden states [R_k, D]) of the rows that the plan runs at each step: what logits read.

    A row's states of one layer are its keys in the next, so at step 0 every row runs all layers but the
    last, of which it needs no more than the keys: the row plan saves most for drafts of one layer.
    """
    plan, last = batch.plan, draft.config.num_layers - 1
    finish = partial(_again, draft.finish) if recompute else draft.finish
    hidden = draft.fuse(batch.aux[plan.keys])
    mixed = draft.mix(batch.tokens[plan.keys + 1], hidden)
    positions = batch.positions[plan.keys]
    key_documents = batch.documents[plan.keys]
    first_keys = [draft.keys_values(mixed, positions)]
    for layer in range(last):
        places = torch.arange(len(plan.keys), device=positions.device)
        bounds = document_bounds(key_documents, key_documents)
        attended = attend(draft.queries(mixed, positions, layer), places, first_keys[layer], (), bounds)
        hidden = finish(attended, hidden, layer)
        mixed = draft.enter(hidden, layer + 1)
        first_keys.append(draft.keys_values(mixed, positions, layer + 1))

    hidden, mixed, positions = (x[plan.key_places[0]] for x in (hidden, mixed, positions))
    own: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in first_keys]  # by layer
    for k in range(plan.num_steps):
        bounds = document_bounds(batch.documents[plan.rows[k]], key_documents)
        lowest = last if k == 0 else 0  # step 0 has run the layers below
        if k:
            hidden, positions = draft.carry(hidden)[plan.keep[k]], positions[plan.keep[k]] + 1
            own = [
                [(keys[plan.keep[k]], values[plan.keep[k]]) for keys, values in of_layer] for of_layer in own
            ]
            mixed = draft.mix(batch.tokens[plan.rows[k] + 1 + k], hidden)
        for layer in range(lowest, last + 1):
            if layer > lowest:
                mixed = draft.enter(hidden, layer)
            if k:
                own[layer].append(draft.keys_values(mixed, positions, layer))
            queries = draft.queries(mixed, positions, layer)
            attended = attend(queries, plan.key_places[k], first_keys[layer], own[layer], bounds)
            hidden = finish(attended, hidden, layer)
        yield k, hidden


def run_unroll(
    draft: Eagle3Draft,
    teacher: TeacherHead,
    target_ids: torch.Tensor,
    batch: PackedBatch,
    step_decay: float,
    loss_kind: LossKind = "kl",
    recompute: bool = False,
) -> UnrollResult:
    """Unroll the draft over a batch and hold each step to the teacher.

    ``target_ids`` [W] maps draft ids to target ids. With ``recompute`` the backward pass computes the MLP
    and the logits again.
    """
    is_full = draft.config.vocab_size == draft.config.target_vocab_size
    targets = teacher_targets(teacher, batch.last, target_ids, is_full)
    loss = torch.zeros((), device=batch.tokens.device)
    step_loss, agrees = [], []

    def hold(hidden: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss of rows and the draft's argmax of each."""
        logits = draft.logits(hidden)
        one = row_losses(logits, targets.probabilities[index], targets.in_draft[index], loss_kind).sum()
        return one, logits.argmax(-1)

    for k, hidden in unroll(draft, batch, recompute):
        index = batch.plan.teacher[k]
        one, best = _again(hold, hidden, index) if recompute else hold(hidden, index)
        loss = loss + step_decay**k * one
        step_loss.append(one.detach())
        agrees.append(target_ids[best] == targets.argmax[index])
    accepted, depth = count_accepted(batch.plan, agrees)
    return UnrollResult(loss, batch.num_supervised, torch.stack(step_loss), accepted, depth)


def _again(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function`` and keep its inputs only: the backward pass calls it again."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


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
