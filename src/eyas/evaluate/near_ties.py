"""Are the differences between two greedy runs what rounding makes, all of them together?

Each first difference may be a near-tie of the target's logits and the whole still not be rounding: another
quantization of the target flips near-ties too, only more of them and always away from the target's choice.
"""

import math
from collections.abc import Sequence
from typing import Any

# Share of compared tokens at which answers may part. In bfloat16, 0.2 % to 0.5 % were measured on targets of
# 135M and 1.5B parameters (benchmarks/LOG.md); float32 answers do not part at all.
_MOST_PER_TOKEN = 0.02
# With fewer differences than this, one sign alone is likely by chance: 2 * 0.5 ** 20 is two in a million.
_LEAST_FOR_SIGNS = 20
# Units: logits. bfloat16's rounding step at logits of 16 to 32, and a quarter of what counts as a near-tie.
LARGE_GAP = 0.125


def rounding_trouble(
    num_differences: int, num_tokens: int, signed: Sequence[float] = (), dtype: str = "bfloat16"
) -> str | None:
    """Say why ``num_differences`` among ``num_tokens`` compared tokens are not rounding, or return None.

    ``num_tokens`` counts the tokens up to each first difference, and all of equal answers. ``signed`` says
    for each difference how much more likely the target finds the other answer's token: logit(found) -
    logit(expected), by a forward pass that is part of neither answer. An exact tie (0) has both signs. In
    float32 answers part only at exact ties, and each difference is judged where it is found.
    """
    if dtype != "float32" and num_differences > most_differences(num_tokens):
        return (
            f"answers part at {num_differences} of {num_tokens} compared tokens "
            f"({num_differences / max(1, num_tokens):.1%}); rounding explains at most {_MOST_PER_TOKEN:.0%}"
        )
    if len(signed) >= _LEAST_FOR_SIGNS and (min(signed) > 0 or max(signed) < 0):
        better = "its own" if max(signed) < 0 else "the other"
        return (
            f"at all {len(signed)} differences the target prefers {better} token; rounding goes both ways, "
            "so another model or other arithmetic answered"
        )
    return None


def most_differences(num_tokens: int) -> int:
    """Return how many first differences rounding explains: its rate, and four standard deviations."""
    expected = _MOST_PER_TOKEN * num_tokens
    return math.floor(expected + 4 * math.sqrt(expected)) if num_tokens else 0


def share_of_large_gaps(gaps: Sequence[float]) -> float | None:
    """Return the share of gaps (units: logits) above ``LARGE_GAP``; None without any."""
    return sum(abs(gap) > LARGE_GAP for gap in gaps) / len(gaps) if gaps else None


def rounding_report(
    num_parted: int, num_tokens: int, gaps: Sequence[float | None], leads: Sequence[float | None]
) -> dict[str, Any]:
    """Return what ``rounding_trouble`` judges, with the share of differences above ``LARGE_GAP``."""
    return {
        "parted": num_parted,
        "tokens": num_tokens,
        "share_of_large_gaps": share_of_large_gaps([gap for gap in gaps if gap is not None]),
        "leads": [lead for lead in leads if lead is not None],
    }
