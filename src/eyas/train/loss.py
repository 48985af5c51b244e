"""Forward KL from teacher to draft, as sums."""

import torch


def kl_sum(logits: torch.Tensor, probabilities: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the KL of the rows that count, summed.

    Shapes: logits, probabilities [R, W]; counts [R] bool (False: the teacher's argmax is outside the
    draft vocabulary, so the row carries no KL). Units: nats.
    """
    log_q = torch.log_softmax(logits.float(), dim=-1)
    p = probabilities.float()
    rows = torch.xlogy(p, p).sum(-1) - (p * log_q).sum(-1)
    return rows[counts].sum()
