"""Two evaluations against each other: how far their acceptance lengths are apart, and how sure that is."""

from collections.abc import Mapping
from typing import Any

from eyas.evaluate.bootstrap import difference_interval
from eyas.serving.report import prompts_of


def difference_text(first: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Say how much longer acceptance is in one report than in the first; None without results by prompt."""
    if first["num_draft_tokens"] != other["num_draft_tokens"]:
        return "another number of draft tokens"
    bounds = difference_interval(prompts_of(first), prompts_of(other))
    if bounds is None:
        return None
    low, high = bounds
    verdict = "real" if low > 0 or high < 0 else "may be chance"
    return f"{other['acceptance'] - first['acceptance']:+.3f} (95 %: {low:+.3f} to {high:+.3f}), {verdict}"
