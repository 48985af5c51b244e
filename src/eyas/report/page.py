"""What came out of a run: a table on the screen and report.html."""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import eyas
from eyas.config.explain import to_commented_yaml
from eyas.report import sections
from eyas.report.data_section import data_section
from eyas.report.finished_run import FinishedRun
from eyas.report.pages import write_page
from eyas.report.serving_section import identical_of, served_charts, served_lengths, served_rows
from eyas.serving.agreement import others_wrote


def summary_rows(run: FinishedRun) -> list[tuple[str, str]]:
    """Return the run's figures, each with its conditions."""
    report, counts = run.evaluation, run.counts
    num_steps = run.facts("train")["num_steps"]
    tokens = counts["train_supervised_tokens"]
    layers = ", ".join(map(str, run.spec.aux_layer_ids))
    prompts, limit = report["num_prompts"], report["max_new_tokens"]
    with_draft, without = report["drafted_tokens_per_s"], report["plain_tokens_per_s"]
    place = f"{report['device']}, batch 1" if run.config.evaluate.in_process else "the engine"
    compared = f", {without:.1f} without" if without else ""
    return [
        ("target", f"{run.config.target.model} ({report['dtype']}, aux layers {layers})"),
        ("trained on", f"{tokens:,} tokens of {run.trained_on}, {num_steps} steps"),
        ("evaluated on", f"{prompts} held-out prompts, greedy, up to {limit} tokens"),
        ("accepted, by position", ", ".join(f"{r:.0%}" for r in report["acceptance_rates"])),
        (
            "acceptance length",
            f"{report['acceptance']:.3f}{interval_text(report)} decoded, {report['predicted']:.3f} predicted"
            + (" (of other texts, see the report)" if prediction_note(run) else ""),
        ),
        *context_rows(report),
        ("identical outputs", identical_of(report)),
        ("speed", f"{with_draft:.1f} tokens/s with the draft{compared} ({place})"),
    ]


def context_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the acceptance lengths by the length of the context, where prompts differ in it."""
    found = report.get("by_context", {})  # reports of earlier versions have none
    lengths = found.get("decoded") or found.get("predicted") or {}
    if len(lengths) < 2:
        return []
    parts = (f"{name} {row['length']:.2f} ({row['num_rounds']:,} rounds)" for name, row in lengths.items())
    return [("acceptance length, by context", ", ".join(parts))]


def interval_text(report: Mapping[str, Any]) -> str:
    """Return the 95 % interval of the acceptance length, in parentheses, where there is one."""
    bounds = report.get("acceptance_interval")
    return f" ({bounds[0]:.3f} to {bounds[1]:.3f})" if bounds else ""


def sureness(report: Mapping[str, Any]) -> str:
    """Say how sure the acceptance length is: its 95 % interval over prompts, or that they are too few."""
    bounds, num = report.get("acceptance_interval"), report["num_prompts"]
    if bounds:
        return f", {num} prompts, 95 %: {bounds[0]:.2f} to {bounds[1]:.2f}"
    return f", {num} prompt{'s' if num > 1 else ''}"


def print_summary(run: FinishedRun) -> None:
    """Print the table and the acceptance length on stdout."""
    report, rows = run.evaluation, summary_rows(run)
    if report["served"] is not None:
        rows += served_rows(report["served"])
    width = max(len(name) for name, _ in rows)
    print()
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    if run.spec.hidden_size < 2048:
        print(f"{'':<{width}}  (no draft makes a target this small faster; large ones are another matter)")
    print(
        f"\nacceptance length: {report['acceptance']:.2f} (K={report['num_draft_tokens']}, held-out"
        f"{sureness(report)})",
        flush=True,
    )


def write_report(run: FinishedRun, path: Path) -> None:
    """Write report.html."""
    report = run.evaluation
    served = report["served"]
    write_page(
        path,
        "report.html.j2",
        title=f"{run.drafter.title} draft for {run.config.target.model}",
        report=report,
        note=prediction_note(run),
        summary=summary_rows(run),
        positions=sections.positions(report),
        served_charts=served_charts(served) if served else (),
        served_lengths=served_lengths(served) if served else (),
        served_rows=served_rows(served) if served else (),
        curves=sections.curves(run.facts("train")["history"]),
        data=data_section(run.data_folder),
        layers=sections.layers(
            {**run.facts("extract").get("layers", {}), **run.facts("train").get("layers", {})}
        ),
        checks=sections.checks(run),
        others=sections.other_evaluations(run),
        settings=to_commented_yaml(run.loaded),
        versions=_versions(),
    )


def prediction_note(run: FinishedRun) -> str | None:
    """Say why the predicted acceptance may differ from the decoded one, where it may.

    The prediction replays the stored answers. They are the target's greedy ones only if it wrote them so.
    """
    whose = others_wrote(run.config)
    if whose is None:
        return None
    return (
        f"predicted and decoded acceptance are of different texts: predicted on {whose}, decoded on "
        "the target's own greedy answers. They need not agree."
    )


def _versions() -> str:
    import torch
    import transformers

    return (
        f"eyas {eyas.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )
