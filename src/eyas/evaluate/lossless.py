"""Does decoding with the draft give the target's own text?"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eyas.errors import ContractError
from eyas.evaluate.near_ties import rounding_trouble

# In fp32 another batch shape moves a logit by about 1e-5 (units: logits). In 16 bits it moves one by a few of
# its rounding steps, and by no less than those of a logit of 16: smaller ones are sums of larger terms.
_NEAR_TIE_FP32 = 1e-3
_STEPS_16_BITS, _LEAST_TOP = 4, 16.0
_SLACK = 1 + 1e-4  # two log-probabilities are not quite as far apart as their logits


@dataclass(frozen=True)
class FirstDifference:
    """Where two answers part; ``gap`` is how far the worse of the two tokens is below ``top``, the target's
    highest logit there. None: one answer ends, a token is not among the likeliest, or nobody was asked.

    ``lead`` is how much more likely the target finds ``found`` than ``expected`` (units: logits), by a
    forward pass that is part of neither answer; None where there was none. A token of -1 stands for an
    answer's end.
    """

    prompt_id: str
    position: int
    expected: int
    found: int
    top: float | None = None
    gap: float | None = None
    lead: float | None = None

    def judged(self, logits: Mapping[int, float]) -> "FirstDifference":
        """Put in ``top`` and ``gap`` from the highest logits there, by token."""
        tokens, top = {self.expected, self.found}, max(logits.values())
        gap = top - min(logits[t] for t in tokens) if logits.keys() >= tokens else None
        return dataclasses.replace(self, top=top, gap=gap)


def first_difference(
    prompt_id: str,
    expected: Sequence[int],
    found: Sequence[int],
    likeliest: Sequence[Mapping[int, float]] | None = None,
) -> FirstDifference | None:
    """Compare the target's own answer with another; ``likeliest`` are the former's logits, by position."""
    for position, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            difference = FirstDifference(prompt_id, position, a, b)
            return difference.judged(likeliest[position]) if likeliest else difference
    if len(expected) != len(found):
        position = min(len(expected), len(found))
        tokens = [answer[position] if position < len(answer) else -1 for answer in (expected, found)]
        return FirstDifference(prompt_id, position, *tokens)
    return None


def is_near_tie(dtype: str, top: float | None, gap: float | None) -> bool:
    """Whether a token ``gap`` below ``top`` can be the likeliest for a batch of another shape."""
    return top is not None and gap is not None and gap <= near_tie(dtype, top)


def near_tie(dtype: str, top: float) -> float:
    """Return how far below ``top`` a logit may be and still be the highest for a batch of another shape.

    Four steps of rounding in 16 bits: in bfloat16 0.5 up to a ``top`` of 32, then 1.
    """
    if dtype == "float32":
        return _NEAR_TIE_FP32
    exponent = math.frexp(max(abs(top), _LEAST_TOP))[1] - 1
    return float(_SLACK * _STEPS_16_BITS * torch.finfo(getattr(torch, dtype)).eps * 2**exponent)


def num_compared(difference: FirstDifference | None, expected: Sequence[int]) -> int:
    """Return how many tokens of two answers were compared: up to the first difference, or all."""
    return len(expected) if difference is None else difference.position + 1


def check_rounding(report: Mapping[str, Any] | None, dtype: str) -> None:
    """Refuse differences that are near-ties one by one, and together more than rounding makes.

    ``report`` is what ``rounding_report`` returns; None: nothing was compared. Raises: ContractError.
    """
    if report is None:
        return
    trouble = rounding_trouble(report["parted"], report["tokens"], report["leads"], dtype)
    if trouble:
        raise ContractError(
            trouble,
            hint="compare the weights, the quantization and the settings of both engines; "
            "report.json has each difference",
        )


def check_lossless(differences: Sequence[dict[str, Any]], dtype: str) -> None:
    """Raises: ContractError for a difference of tokens that are not both near the target's likeliest."""
    for d in differences:
        if not is_near_tie(dtype, d["top"], d["gap"]):
            expected, found = ("its end" if d[key] == -1 else d[key] for key in ("expected", "found"))
            far = "not" if d["gap"] is None else f"{d['gap']:.3g} logits from being"
            raise ContractError(
                f"the draft changed the answer to {d['prompt_id']}: token {d['position']} is {found} "
                f"instead of {expected}, and one of the two is {far} the target's likeliest there",
                hint="this must never happen; please report it with the run folder's report.json",
            )
