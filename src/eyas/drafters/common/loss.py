"""What a draft row is held to: forward KL, or the acceptance rate itself (LK losses), as sums."""

import torch

from eyas.kernels.loss_inputs import HYBRID_DECAY, LossKind


def row_losses(
    logits: torch.Tensor, probabilities: torch.Tensor, counts: torch.Tensor, kind: LossKind
) -> torch.Tensor:
    """Return the loss of each row [R]; a row that does not count has 0.

    kl: KL from teacher to draft. lk: -log of the overlap sum_v min(p, q), the probability that
    speculative sampling accepts. hybrid: KL where they hardly overlap, 1 - overlap where they do.

    Shapes: logits, probabilities [R, W]; counts [R] bool (False: the teacher's argmax is outside the
    draft vocabulary). Units: nats; the overlap is a probability.
    Source: arXiv 2602.23881, sections on LK-alpha and LK-lambda.
    """
    log_q = torch.log_softmax(logits.float(), dim=-1)
    p = probabilities.float()
    if kind == "kl":
        return _kl(p, log_q).masked_fill(~counts, 0)
    overlap = torch.minimum(p, log_q.exp()).sum(-1).clamp(min=1e-6)
    if kind == "lk":
        return (-overlap.log()).masked_fill(~counts, 0)
    share = torch.exp(-HYBRID_DECAY * overlap.detach())
    return (share * _kl(p, log_q) + (1 - share) * (1 - overlap)).masked_fill(~counts, 0)


def _kl(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return torch.xlogy(p, p).sum(-1) - (p * log_q).sum(-1)
