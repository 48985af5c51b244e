"""The teacher of blocks: what the target says behind each token of a block, some blocks at a time."""

from dataclasses import replace

import torch

from eyas.drafters.common.block.anchors import BlockPlan
from eyas.drafters.common.block.loss import BlockTargets
from eyas.targets.teacher import TeacherHead


class BlockJudge:
    """Applies the teacher to stored last states. ``target_ids`` [W] is the draft vocabulary, ascending."""

    def __init__(self, teacher: TeacherHead, target_ids: torch.Tensor) -> None:
        self.teacher, self.target_ids = teacher, target_ids
        vocab_size = teacher.head.shape[0]
        self.is_full = len(target_ids) == vocab_size
        # The head's rows of the draft vocabulary; of the whole one it is the head itself.
        self.rows = teacher.head if self.is_full else teacher.head[target_ids]
        self.draft_id_of = torch.full((vocab_size,), -1, dtype=torch.long, device=target_ids.device)
        places = torch.arange(len(target_ids), device=target_ids.device)
        self.draft_id_of.index_copy_(0, target_ids, places)

    @torch.no_grad()
    def targets(
        self, last: torch.Tensor, plan: BlockPlan, num_predictions: int, with_distribution: bool
    ) -> BlockTargets:
        """Return what the blocks of ``plan`` are held to; last [R, D]."""
        logits = self.teacher_logits(last, plan)
        targets, rows = self.labels(logits.argmax(-1), plan, num_predictions)
        if not with_distribution:
            return targets
        kept = logits if self.is_full else logits[:, self.target_ids]
        whole = torch.logsumexp(logits.float(), -1)
        mass = torch.exp(torch.logsumexp(kept.float(), -1) - whole)
        probabilities = torch.softmax(kept, -1, dtype=torch.float32)
        return replace(targets, probabilities=probabilities[rows], mass=mass[rows])

    def teacher_logits(self, last: torch.Tensor, plan: BlockPlan) -> torch.Tensor:
        """Return the teacher's logits [r, V] of the rows between the first and the last of these blocks."""
        first, stop = (int(plan.spans.min()), int(plan.spans.max())) if len(plan.spans) else (0, 0)
        return self.teacher.logits(last[first:stop])

    def labels(
        self, best: torch.Tensor, plan: BlockPlan, num_predictions: int
    ) -> tuple[BlockTargets, torch.Tensor]:
        """Return the labels of predictions, and the row [n, K] of ``best`` that judges each.

        Shapes: best [r], the likeliest target id of each of ``teacher_logits``.
        """
        first = int(plan.spans.min()) if len(plan.spans) else 0
        places = torch.arange(num_predictions, device=best.device)
        is_judged = places < plan.depths[:, None]
        # Predictions that nothing judges look at some row; the masks take them out.
        rows = (plan.teachers[:, None] - first + places).clamp(max=max(0, len(best) - 1))
        label = self.draft_id_of[best][rows]
        is_labeled = is_judged & (label >= 0)
        return BlockTargets(label.clamp(min=0), is_judged, is_labeled), rows


def first_disagreement(agrees: torch.Tensor, is_judged: torch.Tensor) -> torch.Tensor:
    """Return how many predictions agree before the first that does not, of those judged; inputs [n, K]."""
    return (agrees & is_judged).long().cumprod(dim=1).sum(1)
