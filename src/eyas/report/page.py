"""What came out of a run: a table on the screen and report.html."""

from html import escape
from pathlib import Path

from eyas.files import atomic_file
from eyas.report import sections as parts
from eyas.report.html import html_page, html_table
from eyas.report.serving_section import identical_of, served_rows, served_sections
from eyas.serving.agreement import others_wrote
from eyas.stages.inspect import prepared_sections
from eyas.stages.run_context import RunContext, facts_of


def summary_rows(context: RunContext) -> list[tuple[str, str]]:
    """Return the run's figures, each with its conditions."""
    report = facts_of(context, "evaluate")["report"]
    num_steps = facts_of(context, "train")["num_steps"]
    counts = facts_of(context, context.samples_stage)["counts"]
    tokens, conversations = counts["train_supervised_tokens"], counts["train_conversations"]
    layers = ", ".join(map(str, context.draft_spec.aux_layer_ids))
    prompts, limit = report["num_prompts"], report["max_new_tokens"]
    with_draft, without = report["drafted_tokens_per_s"], report["plain_tokens_per_s"]
    place = f"{report['device']}, batch 1" if context.config.evaluate.in_process else "the engine"
    compared = f", {without:.1f} without" if without else ""
    return [
        ("target", f"{context.config.target.model} ({report['dtype']}, aux layers {layers})"),
        ("trained on", f"{tokens:,} tokens of {conversations:,} conversations, {num_steps} steps"),
        ("evaluated on", f"{prompts} held-out prompts, greedy, up to {limit} tokens"),
        ("accepted, by position", ", ".join(f"{r:.0%}" for r in report["acceptance_rates"])),
        (
            "acceptance length",
            f"{report['acceptance']:.3f} decoded, {report['predicted']:.3f} predicted"
            + (" (of other texts, see the report)" if prediction_note(context) else ""),
        ),
        ("identical outputs", identical_of(report)),
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
    note = prediction_note(context)
    sections = [
        f'<p class="big">acceptance length {report["acceptance"]:.2f}</p>',
        f"<p>tokens per target forward with a chain of K = {report['num_draft_tokens']} draft tokens, "
        "decoded greedily on held-out prompts. Without a draft it is 1.</p>",
        f'<p class="warn">{escape(note)}</p>' if note else "",
        html_table(summary_rows(context)),
        *parts.positions(report),
        *(served_sections(report["served"]) if report["served"] else ()),
        *parts.examples(report),
        *parts.curves(facts_of(context, "train")["history"]),
        *prepared_sections(context),
        *parts.layers(
            facts_of(context, "extract").get("layers", {}) | facts_of(context, "train").get("layers", {})
        ),
        *parts.checks(context),
        *parts.settings(context),
    ]
    path = context.config.run_dir / "report.html"
    with atomic_file(path) as beside:
        page = html_page(f"{context.drafter.title} draft for {context.config.target.model}", sections)
        beside.write_text(page, encoding="utf-8")
    return path


def prediction_note(context: RunContext) -> str | None:
    """Say why the predicted acceptance may differ from the decoded one, where it may.

    The prediction replays the stored answers. They are the target's greedy ones only if it wrote them so.
    """
    whose = others_wrote(context.config)
    if whose is None:
        return None
    return (
        f"predicted and decoded acceptance are of different texts: predicted on {whose}, decoded on "
        "the target's own greedy answers. They need not agree."
    )
