"""What blocks are held to, in plain torch: sums over the predictions of blocks, gradients by autograd.

Per prediction: CE to the target's likeliest token, KL from the target, and L1 between the two
distributions. Per block: a weight for each prediction, fixed (exp(-j / gamma)) or D-PACE's.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LossMix:
    """Which losses a prediction carries, and how predictions are weighted.

    ``gamma``: prediction j weighs exp(-j / gamma). ``dpace_alpha`` takes its place where it is set.
    """

    ce: float = 0.0
    kl: float = 0.0
    l1: float = 0.0
    gamma: float = 4.0
    dpace_alpha: float | None = None

    @property
    def needs_distribution(self) -> bool:
        """Whether more of the teacher is needed than its likeliest token."""
        return bool(self.kl or self.l1)


@dataclass(frozen=True)
class BlockTargets:
    """What the predictions of blocks are held to.

    Shapes: label [n, K], draft id of the target's likeliest token, 0 where the draft vocabulary lacks it;
    is_judged [n, K], whether the prediction is supervised; is_labeled [n, K], is_judged where the draft
    vocabulary holds the label, which is where the losses count; probabilities [n, K, W] fp32 or None,
    renormalised on the draft vocabulary, and mass [n, K] fp32, what they summed to before.
    """

    label: torch.Tensor
    is_judged: torch.Tensor
    is_labeled: torch.Tensor
    probabilities: torch.Tensor | None = None
    mass: torch.Tensor | None = None


@dataclass(frozen=True)
class BlockLosses:
    """Shapes: loss [], the weighted sum; ce [n, K], best [n, K] (draft id of the argmax) and overlap
    [n, K], sum of min(p, q) over all of the target's vocabulary, NaN where it was not asked for."""

    loss: torch.Tensor
    ce: torch.Tensor
    best: torch.Tensor
    overlap: torch.Tensor


def block_losses(logits: torch.Tensor, targets: BlockTargets, mix: LossMix) -> BlockLosses:
    """Return the summed loss of blocks' logits [n, K, W], differentiable. Units: nats; L1 has none."""
    log_q = torch.log_softmax(logits.float(), dim=-1)
    ce = -log_q.gather(-1, targets.label[..., None]).squeeze(-1)
    of_prediction = mix.ce * ce
    overlap = torch.full_like(ce, float("nan")).detach()
    if targets.probabilities is not None and targets.mass is not None:
        p, q = targets.probabilities, log_q.exp()
        if mix.kl:
            of_prediction = of_prediction + mix.kl * (torch.xlogy(p, p) - p * log_q).sum(-1)
        if mix.l1:
            of_prediction = of_prediction + mix.l1 * (q - p).abs().sum(-1)
        overlap = torch.minimum(p * targets.mass[..., None], q).sum(-1).detach()
    weights = prediction_weights(ce.detach(), targets, mix)
    loss = (weights * of_prediction).masked_fill(~targets.is_labeled, 0.0).sum()
    return BlockLosses(loss, ce.detach(), logits.argmax(-1), overlap)


def prediction_weights(ce: torch.Tensor, targets: BlockTargets, mix: LossMix) -> torch.Tensor:
    """Return the weight of each prediction [n, K]; what is not supervised has a meaningless one."""
    if mix.dpace_alpha is not None:
        return dpace_weights(ce, targets, mix.dpace_alpha)
    return fixed_weights(ce.shape[1], mix.gamma, ce.device).expand_as(ce)


def fixed_weights(num_predictions: int, gamma: float, device: torch.device) -> torch.Tensor:
    """Return exp(-j / gamma) for each prediction, [K]."""
    return torch.exp(-torch.arange(num_predictions, device=device) / gamma)


def dpace_weights(ce: torch.Tensor, targets: BlockTargets, alpha: float) -> torch.Tensor:
    """Weight predictions by how much each adds to the expected accepted length, smoothed by ``alpha``.

    With s_i = (1 - alpha) exp(-CE_i) + alpha and P_m = s_0 ... s_m, prediction j weighs the sum of P_m over
    m >= j. Unsupervised predictions count as 1 in the product and 0 in the sum. A prediction whose label the
    draft vocabulary lacks cannot be right: its exp(-CE) is 0.

    Source: D-PACE, arXiv 2605.18810.
    """
    q = torch.exp(-ce).masked_fill(~targets.is_labeled, 0.0)
    s = ((1 - alpha) * q + alpha).masked_fill(~targets.is_judged, 1.0)
    survival = torch.cumprod(s, dim=1).masked_fill(~targets.is_judged, 0.0)
    return survival.flip(1).cumsum(1).flip(1)
