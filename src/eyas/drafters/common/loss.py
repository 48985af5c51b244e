"""What a draft row is held to: forward KL, or the acceptance rate itself (LK losses), as sums."""

from typing import Literal

import torch

LossKind = Literal["kl", "lk", "hybrid"]

# How fast the hybrid loss turns from KL to overlap as overlap grows; the paper's best setting.
HYBRID_DECAY = 3.0


def row_losses(
    logits: torch.Tensor,
    probabilities: torch.Tensor,
    counts: torch.Tensor,
    coverage: torch.Tensor | None,
    kind: LossKind,
) -> torch.Tensor:
    """Return the loss of each row [R]; a row that does not count has 0.

    kl: KL from teacher to draft. lk: -log of the overlap sum_v min(p, q), the probability that
    speculative sampling accepts. hybrid: KL where they hardly overlap, 1 - overlap where they do.
    The overlap is with the target's distribution over its whole vocabulary: a row whose target gives the
    draft vocabulary 0.26 is accepted with a probability of 0.26 at most.

    Shapes: logits, probabilities [R, W] (the teacher, renormalized on the draft vocabulary); counts [R] bool
    (False: the teacher's argmax is outside the draft vocabulary); coverage [R], the probability that the
    target gives the draft vocabulary, read by lk and hybrid alone (None: 1). Units: nats; the overlap is a
    probability.
    Source: arXiv 2602.23881, sections on LK-alpha and LK-lambda.
    """
    log_q = torch.log_softmax(logits.float(), dim=-1)
    p = probabilities.float()
    if kind == "kl":
        return _kl(p, log_q).masked_fill(~counts, 0)
    true_p = p if coverage is None else p * coverage[:, None]
    overlap = torch.minimum(true_p, log_q.exp()).sum(-1).clamp(min=1e-6)
    if kind == "lk":
        return (-overlap.log()).masked_fill(~counts, 0)
    share = torch.exp(-HYBRID_DECAY * overlap.detach())
    return (share * _kl(p, log_q) + (1 - share) * (1 - overlap)).masked_fill(~counts, 0)


def _kl(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return torch.xlogy(p, p).sum(-1) - (p * log_q).sum(-1)
