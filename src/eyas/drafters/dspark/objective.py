"""What the confidence head of a DSpark draft is held to, and how well it is calibrated."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from eyas.drafters.common.block.loss import BlockLosses, fixed_weights
from eyas.drafters.dspark.model import DSparkDraft

# Bins of equal width in which confidence is compared with the chance of acceptance.
_NUM_BINS = 10


@dataclass(frozen=True)
class ConfidenceLoss:
    """Cross-entropy with the overlap sum_v min(p, q), the chance that speculative sampling accepts.

    ``weight`` weighs it; prediction j weighs exp(-j / gamma) of that.
    """

    weight: float
    gamma: float
    num_sums: int = 3 * _NUM_BINS

    def __call__(
        self,
        draft: DSparkDraft,
        normed: torch.Tensor,
        previous: torch.Tensor,
        losses: BlockLosses,
        is_judged: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = draft.confidence(normed, draft.transition(previous))
        overlap = losses.overlap.float().clamp(0, 1)
        weights = fixed_weights(logits.shape[1], self.gamma, logits.device)
        of_each = F.binary_cross_entropy_with_logits(logits, overlap, reduction="none")
        loss = self.weight * (weights * of_each).masked_fill(~is_judged, 0.0).sum()
        return loss, calibration_sums(logits.detach().sigmoid(), overlap, is_judged)

    def ratios(self, sums: Sequence[float]) -> dict[str, float]:
        """Return mean confidence, mean overlap, and the confidence's expected calibration error."""
        counts, confidences, overlaps = (sums[i * _NUM_BINS : (i + 1) * _NUM_BINS] for i in range(3))
        num = max(1, sum(counts))
        gaps = (abs(c - o) for c, o in zip(confidences, overlaps, strict=True))
        return {
            "confidence": sum(confidences) / num,
            "overlap": sum(overlaps) / num,
            "confidence_error": sum(gaps) / num,
        }


def calibration_sums(
    confidence: torch.Tensor, overlap: torch.Tensor, is_judged: torch.Tensor
) -> torch.Tensor:
    """Return count, sum of confidence and sum of overlap of each bin of confidence, fp64 [3 bins]."""
    bins = (confidence * _NUM_BINS).long().clamp(max=_NUM_BINS - 1)
    out = torch.zeros(3, _NUM_BINS, dtype=torch.float64, device=confidence.device)
    judged = is_judged.double()
    for row, values in zip(out, (torch.ones_like(judged), confidence, overlap), strict=True):
        row.index_add_(0, bins.flatten(), (values.double() * judged).flatten())
    return out.flatten()
