"""inspect states: whether every shard is what was written, and what its layers look like."""

import os
import time
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table

from eyas.errors import ContractError
from eyas.files import atomic_file
from eyas.progress import Progress, say
from eyas.report.svg import bar_chart
from eyas.stages.run_context import RunContext
from eyas.store.histograms import LayerFigures, figures_of, verify_all
from eyas.store.shards import ShardStore

_COLUMNS = ("layer", "min", "max", "mean", "RMS", "zeros", "repeated rows")
_PAGE = """<!doctype html><meta charset="utf-8"><title>Hidden states</title>
<style>:root {{ --c0: #2266cc; --c1: #c2541b; --c2: #2a8a4a; --c3: #8a3ea8; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2rem auto; }}
td, th {{ text-align: right; padding: .2rem .8rem; }} svg {{ width: 100%; font: 12px system-ui; }}</style>
<h1>Hidden states in {folder}</h1>
{sections}
"""


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
    sections = []
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
        sections.append(_section(split, names, rows, figures))
    page = context.config.run_dir / "states.html"
    _write(page, str(context.states_folder), sections)
    say(f"histograms: {page}")


def _row(name: str, layer: LayerFigures) -> tuple[str, ...]:
    shares = (layer.num_zeros / layer.num_values, layer.num_repeated / layer.num_rows)
    values = (layer.low, layer.high, layer.mean, layer.rms)
    return (name, *(f"{v:.4g}" for v in values), *(f"{s:.2%}" for s in shares))


def _section(split: str, names: list[str], rows: list[tuple[str, ...]], figures: list[LayerFigures]) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in _COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{escape(v)}</td>" for v in row) + "</tr>" for row in rows)
    charts = [
        f"<h3>Layer {escape(name)}: share of values</h3>" + bar_chart(layer.histogram(), "{:.2%}")
        for name, layer in zip(names, figures, strict=True)
    ]
    return f"<h2>{split}</h2><table><tr>{head}</tr>{body}</table>" + "".join(charts)


def _write(page: Path, folder: str, sections: list[str]) -> None:
    with atomic_file(page) as beside:
        text = _PAGE.format(folder=escape(folder), sections="\n".join(sections))
        beside.write_text(text, encoding="utf-8")
