"""The objective of a DSpark draft: its losses, and the confidence head's with its calibration."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from eyas.drafters.common.block_loss import BlockLosses, fixed_weights
from eyas.drafters.common.block_objective import BlockObjective, Chunk
from eyas.drafters.dspark.model import DSparkDraft

# Bins of equal width in which confidence is compared with the chance of acceptance.
_NUM_BINS = 10


class DSparkObjective(BlockObjective):
    """``confidence_weight`` weighs the confidence's loss; its target is the overlap sum_v min(p, q)."""

    draft: DSparkDraft

    def __init__(self, *arguments: Any, confidence_weight: float, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.confidence_weight = confidence_weight

    @property
    def num_extra_sums(self) -> int:
        return 3 * _NUM_BINS

    @property
    def needs_distribution(self) -> bool:
        return True

    def further(
        self, chunk: Chunk, losses: BlockLosses, is_judged: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.draft.confidence(chunk.normed, self.draft.transition(chunk.previous))
        overlap = losses.overlap.float().clamp(0, 1)
        weights = fixed_weights(self.num_predictions, self.mix.gamma, logits.device).expand_as(logits)
        of_each = F.binary_cross_entropy_with_logits(logits, overlap, reduction="none")
        loss = self.confidence_weight * (weights * of_each).masked_fill(~is_judged, 0.0).sum()
        return loss, calibration_sums(logits.detach().sigmoid(), overlap, is_judged)

    def ratios(self, sums: Sequence[float]) -> dict[str, float | list[float]]:
        """Add mean confidence and overlap, and the confidence's expected calibration error."""
        counts, confidences, overlaps = (
            sums[len(sums) - 1 - (3 - i) * _NUM_BINS : len(sums) - 1 - (2 - i) * _NUM_BINS] for i in range(3)
        )
        num = max(1, sum(counts))
        gaps = (abs(c - o) for c, o in zip(confidences, overlaps, strict=True))
        return {
            **super().ratios(sums),
            "confidence": sum(confidences) / num,
            "overlap": sum(overlaps) / num,
            "confidence_error": sum(gaps) / num,
        }


def calibration_sums(
    confidence: torch.Tensor, overlap: torch.Tensor, is_judged: torch.Tensor
) -> torch.Tensor:
    """Return count, sum of confidence and sum of overlap of each bin of confidence, [3 bins] fp64."""
    bins = (confidence * _NUM_BINS).long().clamp(max=_NUM_BINS - 1)
    out = torch.zeros(3, _NUM_BINS, dtype=torch.float64, device=confidence.device)
    judged = is_judged.double()
    for row, values in zip(out, (torch.ones_like(judged), confidence, overlap), strict=True):
        row.index_add_(0, bins.flatten(), (values.double() * judged).flatten())
    return out.flatten()
