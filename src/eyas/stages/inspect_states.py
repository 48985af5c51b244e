"""inspect states: whether every shard is what was written, and what its layers look like."""

import os
import time

from rich.console import Console
from rich.table import Table

from eyas.errors import ContractError
from eyas.progress import Progress, say
from eyas.report.pages import write_page
from eyas.stages.run_context import RunContext
from eyas.store.histograms import LayerFigures, figures_of, verify_all
from eyas.store.shards import ShardStore

_COLUMNS = ("layer", "min", "max", "mean", "RMS", "zeros", "repeated rows")


def verify_states(context: RunContext) -> None:
    """Check every shard against its checksum. Raises: ContractError when any is not what was written."""
    damaged: list[ContractError] = []
    started, size = time.monotonic(), 0
    stores = [ShardStore(context.states_folder / split) for split in context.stored_splits]
    total = sum(r.num_bytes for store in stores for r in store.records.values())
    with Progress("verify", total >> 20, "MiB") as progress:
        for store in stores:
            for _, found in verify_all(store, os.cpu_count() or 1):
                if isinstance(found, ContractError):
                    damaged.append(found)
                elif isinstance(found, Exception):
                    raise found
                else:
                    size += found
                    progress.advance(found >> 20)
    for error in damaged:
        say(f"verify: {error.what}")
    seconds = max(time.monotonic() - started, 1e-9)
    say(f"verify: {size / 2**20:,.0f} MiB are whole, read at {size / 2**30 / seconds:.2f} GiB/s")
    if damaged:
        raise ContractError(f"{len(damaged)} shards are damaged", hint=damaged[0].hint)
    print(f"{sum(len(s.records) for s in stores)} shards are whole", flush=True)


def inspect_states(context: RunContext) -> None:
    """Print a table of each split's layers and write states.html with their histograms."""
    spec = context.spec
    names = [f"{i}" for i in spec.aux_layer_ids] + [f"{spec.num_layers} (last)"]
    console = Console(highlight=False, soft_wrap=True)
    splits = []
    for split in context.stored_splits:
        store = ShardStore(context.states_folder / split)
        figures = figures_of(store, os.cpu_count() or 1)
        if not figures:
            continue
        rows = [_row(name, layer) for name, layer in zip(names, figures, strict=True)]
        table = Table(*_COLUMNS, title=f"{split}: {figures[0].num_rows:,} tokens", title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        histograms = [(name, layer.histogram()) for name, layer in zip(names, figures, strict=True)]
        splits.append({"name": split, "rows": rows, "histograms": histograms})
    page = context.config.run_dir / "states.html"
    title = f"Hidden states in {context.states_folder}"
    write_page(page, "states.html.j2", title=title, columns=_COLUMNS, splits=splits)
    say(f"histograms: {page}")


def _row(name: str, layer: LayerFigures) -> tuple[str, ...]:
    shares = (layer.num_zeros / layer.num_values, layer.num_repeated / layer.num_rows)
    values = (layer.low, layer.high, layer.mean, layer.rms)
    return (name, *(f"{v:.4g}" for v in values), *(f"{s:.2%}" for s in shares))
