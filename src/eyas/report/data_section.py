"""The report's part on the data that was trained on."""

from pathlib import Path
from typing import Any

from eyas.data.coverage import summarize

_MOST_REASONS = 8


def data_section(folder: Path) -> dict[str, Any]:
    """Return rows and bars of the samples (or prompts) in a prepared ``folder``."""
    summary = summarize(folder)
    return {
        "rows": summary.rows(),
        "lengths": summary.length_bars(),
        "shares": summary.share_bars(),
        "coverage": [(f"{int(size):,}", share) for size, share in summary.manifest["coverage"].items()],
        "drops": list(summary.manifest["drops"].items())[:_MOST_REASONS],
    }
