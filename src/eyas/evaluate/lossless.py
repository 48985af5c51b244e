"""Does decoding with the draft give the target's own text?"""

from collections.abc import Sequence
from dataclasses import dataclass

# Units: logits. In fp32 another batch shape moves a logit by about 1e-5; in bf16 by its rounding
# step near 20, about 0.1.
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.06}


@dataclass(frozen=True)
class FirstDifference:
    """Where two answers part, and the target's top-two gap there."""

    prompt_id: str
    position: int
    expected: int
    found: int
    gap: float


def first_difference(
    prompt_id: str, expected: Sequence[int], found: Sequence[int], gaps: Sequence[float]
) -> FirstDifference | None:
    """Compare the target's own answer with the speculative one; ``gaps`` are those of the former."""
    for position, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return FirstDifference(prompt_id, position, a, b, gaps[position])
    if len(expected) != len(found):
        position = min(len(expected), len(found))
        tokens = [answer[position] if position < len(answer) else -1 for answer in (expected, found)]
        return FirstDifference(prompt_id, position, tokens[0], tokens[1], float("inf"))
    return None
