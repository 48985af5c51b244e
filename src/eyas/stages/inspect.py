"""inspect prepared: what the data looks like before it is trained on."""

from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.data.coverage import summarize
from eyas.data.prepared import SPLITS, read_samples
from eyas.errors import UserError
from eyas.stages.run_context import RunContext
from eyas.types import TokenizedSample

_BAR_WIDTH = 40
_LEARNED = "black on green"


def inspect_prepared(context: RunContext, num_samples: int, sample_id: str | None) -> None:
    """Print figures and samples of the newest data: regenerated where that is there, else prepared."""
    folder = context.data_folder
    console = Console(highlight=False, soft_wrap=True)
    summary = summarize(folder)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in summary.rows():
        table.add_row(Text(name, style="bold"), Text(value))
    console.print(Text(str(folder)), table)
    _print_bars(console, "tokens a sample, up to", summary.length_bars())
    _print_bars(console, "supervised share of a sample", summary.share_bars())
    if not len(summary.lengths):
        console.print("\nThese are prompts; samples come with: eyas regenerate")
        return
    shown = list(_chosen(folder, len(summary.lengths), num_samples, sample_id))
    if sample_id is not None and not shown:
        raise UserError(f"there is no sample {sample_id!r} in {folder}")
    for sample in shown:
        _print_sample(console, sample, context)


def _chosen(folder: Path, number: int, num_samples: int, sample_id: str | None) -> Iterator[TokenizedSample]:
    """Yield the sample asked for, or some spread evenly over the folder."""
    samples = (sample for split in SPLITS for sample in read_samples(folder, split))
    if sample_id is not None:
        # A conversation whose turns have contexts of their own has several samples.
        return (s for s in samples if s.sample_id == sample_id or s.sample_id.startswith(f"{sample_id}#"))
    return islice(samples, 0, None, max(1, -(-number // max(1, num_samples)))) if num_samples else iter(())


def _print_bars(console: Console, title: str, bars: list[tuple[str, int]]) -> None:
    if not bars:
        return
    most = max(n for _, n in bars) or 1
    width = max(len(name) for name, _ in bars)
    console.print(Text(f"\n{title}", style="bold"))
    for name, number in bars:
        console.print(Text(f"{name:>{width}} {'█' * round(_BAR_WIDTH * number / most)} {number:,}"))


def _print_sample(console: Console, sample: TokenizedSample, context: RunContext) -> None:
    learned = int(sample.loss_mask.sum())
    goes_on = ", cut: the answer goes on" if sample.cut else ""
    console.print(
        Text(f"\n{sample.sample_id}", style="bold"),
        Text(f"({len(sample):,} tokens, {learned:,} supervised{goes_on})", style="dim"),
    )
    text = Text()
    # Colour where there is colour, brackets where the output goes to a file.
    opening, closing = ("", "") if console.is_terminal else ("⟦", "⟧")
    for start, end, is_learned in _runs(sample.loss_mask):
        words = str(context.tokenizer.decode(sample.input_ids[start:end], skip_special_tokens=False))
        if is_learned:
            text.append(f"{opening}{words}{closing}", style=_LEARNED)
        else:
            text.append(words, style="dim")
    console.print(text)


def _runs(mask: np.ndarray) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, end, value) of each stretch of equal values."""
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    for start, end in pairwise(edges):
        yield start, end, bool(mask[start])
