"""The toy's rows and loss: KL of every token of a round, at rows that are drawn anew for each batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from eyas.drafters.base import Rounds
from eyas.drafters.common.batch import PackedBatch
from eyas.drafters.common.loss import row_losses
from eyas.drafters.common.objective import AutogradObjective
from eyas.drafters.common.teacher_targets import teacher_targets
from eyas.targets.teacher import TeacherHead
from toy_drafter.model import ToyDraft


@dataclass(frozen=True)
class ToyPlan:
    """rows [R], at which a round can start; drawn [R] bool, those that are trained; teacher [R, S], each
    token's index among the supervised positions; judged [R, S], whether it and all before it have one."""

    rows: torch.Tensor
    drawn: torch.Tensor
    teacher: torch.Tensor
    judged: torch.Tensor
    num_supervised: int

    def tensors(self) -> list[torch.Tensor]:
        return [self.rows, self.drawn, self.teacher, self.judged]

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "ToyPlan":
        return ToyPlan(*(change(t) for t in self.tensors()), self.num_supervised)


def plan_rounds(
    supervised: torch.Tensor, documents: torch.Tensor, num_tokens: int, share: float, draw: int
) -> ToyPlan:
    same = documents[1:] == documents[:-1]
    rows = (same & supervised[1:]).nonzero().flatten()
    places = rows[:, None] + 1 + torch.arange(num_tokens)
    inside = places < len(supervised)
    places = places.clamp(max=len(supervised) - 1)
    judged = inside & supervised[places] & (documents[places] == documents[rows][:, None])
    chance = torch.rand(len(rows), generator=torch.Generator().manual_seed(draw))
    drawn = chance < share
    teacher = torch.cumsum(supervised, 0)[places] - 1
    return ToyPlan(rows, drawn, teacher, judged.cumprod(1).bool(), int(drawn.sum()))


def replay(
    draft: ToyDraft, teacher: TeacherHead, target_ids: torch.Tensor, batch: PackedBatch[ToyPlan]
) -> tuple[torch.Tensor, Rounds]:
    """Return the loss of each row and token [R, S], and what rounds would accept."""
    plan = batch.plan
    targets = teacher_targets(teacher, batch.last, target_ids, False, with_coverage=False)
    logits = draft(batch.aux[plan.rows], batch.tokens[plan.rows + 1])
    index = plan.teacher.flatten()
    losses = row_losses(
        logits.flatten(0, 1), targets.probabilities[index], targets.in_draft[index], None, "kl"
    )
    agrees = (target_ids[logits.argmax(-1)] == targets.argmax[plan.teacher]) & plan.judged
    rounds = Rounds(plan.rows, agrees.cumprod(1).sum(1), plan.judged.sum(1))
    return losses.view_as(plan.judged).masked_fill(~plan.judged, 0), rounds


class ToyObjective(AutogradObjective):
    num_sums = 3  # the loss, accepted tokens, trained rows

    def __init__(
        self, draft: ToyDraft, teacher: TeacherHead, target_ids: torch.Tensor, **how: object
    ) -> None:
        super().__init__(draft, **how)
        self.draft, self.teacher, self.target_ids = draft, teacher, target_ids

    def backward(self, batch: PackedBatch[ToyPlan]) -> torch.Tensor:
        loss, sums, _ = self._of(batch)
        loss.backward()
        return sums

    @torch.no_grad()
    def measure(self, batch: PackedBatch[ToyPlan], num_draft_tokens: int) -> tuple[torch.Tensor, Rounds]:
        _, sums, rounds = self._of(batch)
        return sums, rounds

    def ratios(self, sums: Sequence[float]) -> dict[str, float | list[float]]:
        rows = max(1.0, sums[2])
        return {"loss": sums[0] / rows, "accepted": sums[1] / rows}

    def _of(self, batch: PackedBatch[ToyPlan]) -> tuple[torch.Tensor, torch.Tensor, Rounds]:
        with self.autocast():
            losses, rounds = replay(self.draft, self.teacher, self.target_ids, batch)
        drawn = batch.plan.drawn
        loss = losses[drawn].sum()
        parts = (loss.detach(), rounds.accepted[drawn].sum(), drawn.sum())
        return loss, torch.stack([part.double() for part in parts]), rounds
