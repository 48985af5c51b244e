"""Does decoding with the draft give the target's own text?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# In fp32 another batch shape moves a logit by about 1e-5 (units: logits). In 16 bits it moves one by a few of
# its rounding steps, and by no less than those of a logit of 16: smaller ones are sums of larger terms.
_NEAR_TIE_FP32 = 1e-3
_STEPS_16_BITS, _LEAST_TOP = 4, 16.0


class Lead(NamedTuple):
    """The target's highest logit at a position, and how far another one is below it."""

    top: float
    gap: float


UNRELATED = Lead(_LEAST_TOP, math.inf)


@dataclass(frozen=True)
class FirstDifference:
    """Where two answers part; ``gap`` is how far the worse of the two tokens is below ``top``, in logits."""

    prompt_id: str
    position: int
    expected: int
    found: int
    top: float
    gap: float


def first_difference(
    prompt_id: str, expected: Sequence[int], found: Sequence[int], leads: Sequence[Lead]
) -> FirstDifference | None:
    """Compare the target's own answer with the speculative one; ``leads`` are those of the former."""
    for position, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return FirstDifference(prompt_id, position, a, b, *leads[position])
    if len(expected) != len(found):
        position = min(len(expected), len(found))
        tokens = [answer[position] if position < len(answer) else -1 for answer in (expected, found)]
        return FirstDifference(prompt_id, position, tokens[0], tokens[1], *UNRELATED)
    return None


def lead_over(logits: Mapping[int, float], tokens: Sequence[int]) -> Lead:
    """Return the lead over the worst of ``tokens``; ``logits`` are the highest ones, by token."""
    top = max(logits.values())
    return Lead(top, top - min(logits.get(token, -math.inf) for token in tokens))


def near_tie(dtype: str, top: float) -> float:
    """Return how far below ``top`` a logit may be and still be the highest for a batch of another shape.

    Four steps of rounding in 16 bits: 0.5 in bfloat16 up to a ``top`` of 32, then 1.
    """
    if dtype == "float32":
        return _NEAR_TIE_FP32
    exponent = math.frexp(max(abs(top), _LEAST_TOP))[1] - 1
    return float(_STEPS_16_BITS * torch.finfo(getattr(torch, dtype)).eps * 2**exponent)
