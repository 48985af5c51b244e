"""The parts of report.html on training and measurements, one function each; without data, empty."""

import platform
from collections.abc import Sequence
from html import escape
from typing import Any

import eyas
from eyas.config.explain import to_commented_yaml
from eyas.report.html import html_bars, html_table
from eyas.report.serving_section import identical_of
from eyas.report.svg import line_chart
from eyas.stages.run_context import RunContext, facts_of


def curves(history: Sequence[dict[str, Any]]) -> list[str]:
    """Loss and acceptance length over the optimizer's steps."""
    steps = [row for row in history if not row.get("validation") and row.get("taken", True)]
    checks = [row for row in history if row.get("validation")]
    loss = {
        "training": [(r["step"], r["loss"]) for r in steps],
        "held out": [(r["step"], r["loss"]) for r in checks],
    }
    lengths = [(r["step"], r["acceptance_length"]) for r in checks]
    return [
        "<h2>Loss</h2><p>The draft's weighted training loss per supervised row (nats).</p>",
        line_chart(loss, "optimizer step", "loss"),
        "<h2>Acceptance length while training</h2><p>Replayed on held-out answers.</p>",
        line_chart({"held out": lengths}, "optimizer step", "tokens per target forward"),
    ]


def positions(report: dict[str, Any]) -> list[str]:
    """Acceptance by draft position, decoded and predicted."""
    pairs = zip(report["acceptance_rates"], report["predicted_rates"], strict=False)  # SGLang has no rates
    bars = [
        (f"token {k}, {which}", rate)
        for k, (decoded, predicted) in enumerate(pairs, 1)
        for which, rate in (("decoded", decoded), ("predicted", predicted))
    ]
    return [
        "<h2>Acceptance by position</h2><p>Share of rounds in which draft token k was accepted.</p>",
        html_bars(bars, "{:.1%}"),
    ]


def layers(found: dict[str, dict[str, Any]]) -> list[str]:
    """What the captured states look like, layer by layer."""
    rows: list[tuple[str, ...]] = []
    bars: list[tuple[str, float]] = []
    for split, table in found.items():
        for layer, row in table.items():
            figures = (f"{row[key]:.4g}" for key in ("min", "max", "mean", "rms"))
            rows.append((f"{layer}, {split.replace('_', ' ')}", *figures))
            if split == "train":
                bars.append((f"layer {layer}", row["rms"]))
    if not rows:
        return []
    return [
        "<h2>Hidden states</h2><p>Root mean square of each captured layer (layer L is the stream after L "
        "layers; the last one feeds the final norm). A layer of zeros, or two that are equal, would be a "
        "capture gone wrong.</p>",
        html_bars(bars, "{:.4g}"),
        html_table(rows, ("layer", "min", "max", "mean", "RMS")),
    ]


def examples(report: dict[str, Any]) -> list[str]:
    """Decoded answers, with what the draft got right and wrong."""
    found = report.get("examples") or []
    if not found:
        return []
    parts = [
        "<h2>Examples</h2>",
        '<p class="key"><span class="accepted">draft token, accepted</span><span class="rejected">'
        "draft token, refused</span><span>token of the target</span></p>",
    ]
    for example in found:
        pieces = "".join(
            escape(text) if kind == "target" else f'<span class="{escape(kind)}">{escape(text)}</span>'
            for kind, text in example["pieces"]
        )
        parts.append(f'<p class="soft">{escape(example["prompt"])}</p><div class="example">{pieces}</div>')
    return parts


def checks(context: RunContext) -> list[str]:
    """The contracts that this run's finished stages have passed; each stage stops where one does not hold."""
    report = facts_of(context, "evaluate")["report"]
    extracted, prepared = facts_of(context, "extract"), facts_of(context, "prepare")
    spec = context.spec
    dropped = sum(prepared.get("drops", {}).values())
    failures = extracted["num_failures"]
    lossless = f"answers that are the target's own, token for token: {identical_of(report)}"
    if report["differences"]:
        lossless += "; each other one first differs at a near-tie of the target's likeliest tokens"
    rows = [
        ("data", f"every row kept or dropped with a reason ({dropped:,} dropped)"),
        ("tokenizer, template", f"the same in every stage ({spec.tokenizer_fingerprint}, "
                                f"{spec.template_fingerprint})"),
        ("probe", "at the engine's start and end: teacher rebuilt from the states agrees with the engine, "
                  "alone and in a batch; layers differ from each other and from zero"),
        ("states", f"tokens in = tokens out, finite, as large as in the probe; {failures:,} samples failed"),
        ("shards", "checksummed when written, verified when read"),
        ("export", "reloaded; its logits equal the trained draft's"),
    ]  # fmt: skip
    if report["identical"] is not None:
        rows.append(("lossless", lossless))
    return ["<h2>Checks passed</h2>", html_table(rows)]


def settings(context: RunContext) -> list[str]:
    import torch
    import transformers

    versions = (
        f"eyas {eyas.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )
    return [
        "<details><summary>Settings and versions</summary>",
        f"<pre>{escape(to_commented_yaml(context.loaded))}</pre>",
        f"<p>{versions}</p></details>",
    ]
