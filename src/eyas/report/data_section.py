"""The report's part on the data that was trained on."""

from pathlib import Path

from eyas.data.coverage import summarize
from eyas.report.html import html_bars, html_table


def data_sections(folder: Path) -> list[str]:
    """Return the part on the samples (or prompts) in a prepared ``folder``, as HTML."""
    summary = summarize(folder)
    coverage = [(f"{int(size):,}", share) for size, share in summary.manifest["coverage"].items()]
    drops = list(summary.manifest["drops"].items())[:8]
    return [
        "<h2>Data</h2>",
        html_table(summary.rows()),
        "<h3>Tokens a sample, up to</h3>",
        html_bars([(name, float(n)) for name, n in summary.length_bars()], "{:,.0f}"),
        "<h3>Supervised share of a sample</h3>",
        html_bars([(name, float(n)) for name, n in summary.share_bars()], "{:,.0f}"),
        "<h3>Supervised tokens that a draft vocabulary of this size covers</h3>",
        html_bars(coverage, "{:.2%}"),
        *(
            ["<h3>Dropped rows</h3>", html_bars([(r, float(n)) for r, n in drops], "{:,.0f}")]
            if drops
            else []
        ),
    ]
