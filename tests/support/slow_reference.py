"""Losses, AdamW and attention in float64 the slow, obvious way; nothing is imported from what is tested."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def softmax(logits: Floats) -> Floats:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def row_loss(
    logits: Floats, p: Floats, kind: str, coverage: float = 1.0, share: float | None = None
) -> float:
    """Return the loss of one row by its definition, token by token.

    ``p`` is the teacher on the draft vocabulary, to which the target gives ``coverage``. ``share`` is the
    hybrid loss's weight of the KL; None takes that of these logits.
    """
    q = softmax(logits)
    kl = sum(p_v * (math.log(p_v) - math.log(q_v)) for p_v, q_v in zip(p, q, strict=True) if p_v > 0)
    overlap = sum(min(coverage * p_v, q_v) for p_v, q_v in zip(p, q, strict=True))
    if kind == "kl":
        return kl
    if kind == "lk":
        return -math.log(overlap)
    share = math.exp(-3.0 * overlap) if share is None else share
    return share * kl + (1 - share) * (1 - overlap)


def row_gradient(logits: Floats, p: Floats, kind: str, coverage: float = 1.0) -> Floats:
    """Return the derivative by each logit, measured; the hybrid loss's weight is a constant in it."""
    share = math.exp(-3.0 * sum(np.minimum(coverage * p, softmax(logits))))
    step, gradient = 1e-6, np.zeros_like(logits)
    for place in range(len(logits)):
        moved = [logits.copy(), logits.copy()]
        moved[0][place] -= step
        moved[1][place] += step
        below, above = (row_loss(m, p, kind, coverage, share) for m in moved)
        gradient[place] = (above - below) / (2 * step)
    return gradient


def adamw_steps(
    weight: Floats,
    gradients: Sequence[Floats],
    rates: Sequence[float],
    betas: tuple[float, float],
    decay: float,
    eps: float = 1e-8,
) -> Floats:
    """Return a weight after a step of AdamW with each gradient, at the rate of that step."""
    weight, first, second = weight.copy(), np.zeros_like(weight), np.zeros_like(weight)
    for number, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        weight *= 1 - rate * decay
        mean, size = first / (1 - betas[0] ** number), np.sqrt(second / (1 - betas[1] ** number))
        weight -= rate * mean / (size + eps)
    return weight


def attend_once(
    query: Floats, keys: Floats, values: Floats, seen: npt.NDArray[np.bool_], scale: float
) -> Floats:
    """Return the attention [heads, value width] of a query [heads, width] over keys [kv heads, T, width]."""
    group = len(query) // len(keys)
    rows = []
    for head, q in enumerate(query):
        k, v = keys[head // group], values[head // group]
        weights = softmax(np.where(seen, k @ q * scale, -np.inf))
        rows.append(weights @ v)
    return np.stack(rows)
