"""HTML that pages share: their frame, tables and bars. Everything is inline, so a page is one file."""

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --c0: #2266cc; --c1: #c2541b; --c2: #1d7a3c; --c3: #8a3ea8;
  --line: #d4d4d4; --bg: #fff; --fg: #1a1a1a; --soft: #5c5c5c; --good: #d3f2dc; --bad: #fbdcd5; }
@media (prefers-color-scheme: dark) { :root { --c0: #7db0ff; --c1: #ffa36b; --c2: #76d695; --c3: #d59af0;
  --line: #3c4046; --bg: #16181b; --fg: #e6e6e6; --soft: #a3a7ad; --good: #1d4a2c; --bad: #5b2a20; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; background: var(--bg); color: var(--fg);
  max-width: 780px; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.4rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0;
  border-bottom: 1px solid var(--line); }
td + td, th + th { font-variant-numeric: tabular-nums; }
td:first-child { min-width: 7rem; }
.wide { overflow-x: auto; overflow-wrap: normal; }
svg { width: 100%; height: auto; font: 13px system-ui, sans-serif; fill: var(--fg); }
.grid { stroke: var(--line); stroke-width: 1; }
.bars { display: grid; grid-template-columns: minmax(4.5rem, max-content) 1fr; gap: .25rem .7rem;
  align-items: center; }
.bars b { font-weight: normal; text-align: right; overflow-wrap: anywhere; max-width: 14rem; }
.bars i { display: flex; align-items: center; gap: .4rem; font-style: normal;
  font-variant-numeric: tabular-nums; }
.bars i::before { content: ""; height: 1rem; min-width: 1px; width: calc(var(--v) * 70%);
  background: var(--c0); border-radius: 2px; }
pre { overflow-x: auto; font-size: 13px; border: 1px solid var(--line); padding: .8rem; border-radius: 6px; }
details > summary { cursor: pointer; font-weight: 600; margin-top: 2rem; }
.big { font-size: 2.4rem; font-weight: 600; margin: .2rem 0; }
.soft { color: var(--soft); } .warn { border-left: 4px solid var(--c1); padding-left: .8rem; }
.rejected { font-size: .85em; color: var(--soft); }
.example { white-space: pre-wrap; border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; }
.accepted { background: var(--good); } .rejected { background: var(--bad); text-decoration: line-through; }
.key span { padding: 0 .3rem; margin-right: .6rem; }
@media (max-width: 600px) { svg { font-size: 22px; } .big { font-size: 1.9rem; } }
@media print { body { max-width: none; } details { display: block; } }
"""


def html_page(title: str, sections: Iterable[str]) -> str:
    """Return a whole page that needs no other file; dark and light as the reader's system is."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def html_table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return a table, its first column naming the rows, escaped."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table>{f"<tr>{head}</tr>" if head else ""}{body}</table></div>'


def html_bars(bars: Sequence[tuple[str, float]], value_format: str) -> str:
    """Draw named bars below each other, each with its value behind it."""
    if not bars:
        return "<p>no data</p>"
    most = max(value for _, value in bars) or 1.0
    cells = "".join(
        f'<b>{escape(name)}</b><i style="--v:{max(0.0, value / most):.4f}">'
        f"{escape(value_format.format(value))}</i>"
        for name, value in bars
    )
    return f'<div class="bars">{cells}</div>'
