"""Holds a chunk of logits to the teacher by kernels: no distribution of either is stored."""

import torch

from eyas.drafters.common.block.anchors import BlockPlan
from eyas.drafters.common.block.judge import BlockJudge
from eyas.drafters.common.block.loss import BlockLosses, BlockTargets, LossMix, prediction_weights
from eyas.drafters.common.block.loss_kernel import TeacherRows, gradient_, log_sum_exp


@torch.no_grad()
def fused_losses_(
    logits: torch.Tensor,
    scale: float,
    judge: BlockJudge,
    last: torch.Tensor,
    plan: BlockPlan,
    mix: LossMix,
    with_distribution: bool,
) -> tuple[BlockLosses, BlockTargets, torch.Tensor]:
    """Return the losses of logits [c, K, W] times ``scale``, what they were held to, and their gradient.

    The gradient is written over the logits. ``last`` [R, D] and ``plan`` are as in ``BlockJudge.targets``.
    """
    predictions = logits.shape[1]
    of_teacher = judge.teacher_logits(last, plan)
    whole, likeliest = log_sum_exp(of_teacher)
    targets, rows = judge.labels(likeliest, plan, predictions)
    teacher = None
    if with_distribution:
        kept, lse_of_kept = of_teacher, whole
        if not judge.is_full:
            kept = of_teacher[:, judge.target_ids]
            lse_of_kept, _ = log_sum_exp(kept)
        teacher = TeacherRows(kept, lse_of_kept, torch.exp(lse_of_kept - whole), rows.flatten())
    flat = logits.flatten(0, 1)
    lse, best = log_sum_exp(flat, scale)
    of_label = flat.gather(1, targets.label.view(-1, 1)).squeeze(1).float() * scale
    ce = (lse - of_label).view_as(targets.label)
    weights = prediction_weights(ce, targets, mix).masked_fill(~targets.is_labeled, 0.0)
    sums = gradient_(flat, lse, targets.label.flatten(), weights.flatten().contiguous(), scale, mix, teacher)
    of_prediction, overlap = mix.ce * ce, torch.full_like(ce, float("nan"))
    if sums is not None:
        of_prediction = of_prediction + mix.kl * sums.kl.view_as(ce) + mix.l1 * sums.l1.view_as(ce)
        overlap = sums.overlap.view_as(ce)
    losses = BlockLosses((weights * of_prediction).sum(), ce, best.view_as(targets.label), overlap)
    return losses, targets, logits
