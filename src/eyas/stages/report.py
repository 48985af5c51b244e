"""What came out of a run: a table on the screen and report.html."""

import platform
from html import escape
from pathlib import Path
from typing import Any

import eyas
from eyas.config.explain import to_commented_yaml
from eyas.files import atomic_file
from eyas.stages.context import RunContext, facts_of
from eyas.stages.html import html_table
from eyas.stages.inspect import prepared_sections
from eyas.stages.served_page import served_rows, served_sections
from eyas.stages.svg import line_chart

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --c0: #2266cc; --c1: #c2541b; --c2: #2a8a4a; --c3: #8a3ea8;
  --line: #ccc; --bg: #fff; --fg: #1a1a1a; }}
@media (prefers-color-scheme: dark) {{ :root {{ --c0: #7db0ff; --c1: #ffa36b; --c2: #76d695; --c3: #d59af0;
  --line: #444; --bg: #16181b; --fg: #e6e6e6; }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; background: var(--bg); color: var(--fg);
  max-width: 760px; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
td, th {{ text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); }}
td + td {{ font-variant-numeric: tabular-nums; }}
svg {{ width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: var(--fg); }}
.grid {{ stroke: var(--line); stroke-width: 1; }}
pre {{ overflow-x: auto; font-size: 13px; border: 1px solid var(--line); padding: .8rem; }}
.big {{ font-size: 2.4rem; font-weight: 600; }}
</style></head><body>
<h1>{title}</h1>
<p class="big">{headline}</p>
<p>{explanation}</p>
{sections}
</body></html>
"""


def summary_rows(context: RunContext) -> list[tuple[str, str]]:
    """Return the run's figures, each with its conditions."""
    report = facts_of(context, "evaluate")["report"]
    num_steps = facts_of(context, "train")["num_steps"]
    counts = facts_of(context, context.samples_stage)["counts"]
    tokens, conversations = counts["train_supervised_tokens"], counts["train_conversations"]
    layers = ", ".join(map(str, context.spec.aux_layer_ids))
    prompts, limit = report["num_prompts"], report["max_new_tokens"]
    with_draft, without = report["drafted_tokens_per_s"], report["plain_tokens_per_s"]
    place = f"{report['device']}, batch 1" if context.config.evaluate.in_process else "the engine"
    compared = f", {without:.1f} without" if without else ""
    return [
        ("target", f"{context.config.target.model} ({report['dtype']}, aux layers {layers})"),
        ("trained on", f"{tokens:,} tokens of {conversations:,} conversations, {num_steps} steps"),
        ("evaluated on", f"{prompts} held-out prompts, greedy, up to {limit} tokens"),
        ("accepted, by position", ", ".join(f"{r:.0%}" for r in report["acceptance_rates"])),
        ("acceptance length", f"{report['acceptance']:.3f} decoded, {report['predicted']:.3f} predicted"),
        ("identical outputs", f"{report['identical']} of {prompts}"),
        ("speed", f"{with_draft:.1f} tokens/s with the draft{compared} ({place})"),
    ]


def print_summary(context: RunContext) -> None:
    """Print the table and the acceptance length on stdout."""
    rows = summary_rows(context)
    served = facts_of(context, "evaluate")["report"]["served"]
    if served is not None:
        rows += served_rows(served)
    width = max(len(name) for name, _ in rows)
    print()
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    if context.spec.hidden_size < 2048:
        print(f"{'':<{width}}  (no draft makes a target this small faster; large ones are another matter)")
    report = facts_of(context, "evaluate")["report"]
    print(
        f"\nacceptance length: {report['acceptance']:.2f} (K={report['num_draft_tokens']}, held-out)",
        flush=True,
    )


def write_report(context: RunContext) -> Path:
    """Write report.html into the run folder and return its path."""
    report = facts_of(context, "evaluate")["report"]
    history = facts_of(context, "train")["history"]
    steps = [row for row in history if not row.get("validation") and row.get("taken", True)]
    checks = [row for row in history if row.get("validation")]
    sections = [
        html_table(summary_rows(context)),
        "<h2>Loss</h2><p>KL to the target's distribution, summed over the unroll's weighted steps, "
        "per supervised row (nats).</p>",
        line_chart(
            {
                "training": [(r["step"], r["loss"]) for r in steps],
                "held out": [(r["step"], r["loss"]) for r in checks],
            },
            "optimizer step",
            "loss",
        ),
        "<h2>Acceptance length on held-out answers</h2>",
        line_chart(
            {"held out": [(r["step"], r["acceptance_length"]) for r in checks]},
            "optimizer step",
            "tokens per target forward",
        ),
        "<h2>Acceptance by position</h2><p>Share of rounds in which draft token k was accepted.</p>",
        _rates(report),
        *(served_sections(report["served"]) if report["served"] else ()),
        *prepared_sections(context),
        "<h2>Settings</h2>",
        f"<pre>{escape(to_commented_yaml(context.loaded))}</pre>",
        f"<p>eyas {eyas.__version__}, {_versions()}</p>",
    ]  # fmt: skip
    page = _PAGE.format(
        title=escape(f"EAGLE-3 draft for {context.config.target.model}"),
        headline=f"acceptance length {report['acceptance']:.2f}",
        explanation="tokens per target forward with a chain of "
        f"K = {report['num_draft_tokens']} draft tokens, decoded greedily on held-out prompts. "
        "Without a draft it is 1.",
        sections="\n".join(sections),
    )
    path = context.config.run_dir / "report.html"
    with atomic_file(path) as beside:
        beside.write_text(page, encoding="utf-8")
    return path


def _rates(report: dict[str, Any]) -> str:
    pairs = zip(report["acceptance_rates"], report["predicted_rates"], strict=False)  # SGLang has no rates
    return html_table(
        [(f"draft token {k}", f"{a:.1%} decoded, {p:.1%} predicted") for k, (a, p) in enumerate(pairs, 1)]
    )


def _versions() -> str:
    import torch
    import transformers

    python = platform.python_version()
    return f"torch {torch.__version__}, transformers {transformers.__version__}, Python {python}"
