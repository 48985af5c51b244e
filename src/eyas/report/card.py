"""The model card beside a draft: what it is for, how it was made, what was measured and how."""

from pathlib import Path
from textwrap import indent

import yaml

import eyas
from eyas.engines.info import engines_that
from eyas.files import atomic_file
from eyas.registry import SERVING_ENGINE
from eyas.report.finished_run import FinishedRun
from eyas.report.page import prediction_note, summary_rows
from eyas.report.sections import other_evaluations
from eyas.report.stale import CARD, MARK


def write_card(run: FinishedRun, folder: Path) -> None:
    """Write README.md into the draft's ``folder``; of a draft that is not measured it says so."""
    target = run.config.target.model
    local = target.startswith((".", "/", "~", "demo:"))
    front = {
        "pipeline_tag": "text-generation",
        "tags": [run.drafter.name, "speculative-decoding", "eyas"],
        **({} if local else {"base_model": target}),
    }
    named = Path(target).name if local and not target.startswith("demo:") else target
    evaluated = bool(run.facts("evaluate"))
    tokens = run.config.evaluate.num_draft_tokens
    layers = ", ".join(map(str, run.spec.aux_layer_ids))
    text = f"""\
---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# {run.drafter.title} draft for {named}

{MARK}

A draft model for speculative decoding: it proposes tokens that {named} verifies, so that the answers are the
target's own and come faster. It is of no use alone. Made by eyas {eyas.__version__}.

## Serve it

{_commands(run, named, tokens, folder)}

It reads the target's hidden states after layers {layers}; engines take them from config.json.

## Measured

{_measured(run) if evaluated else "Nothing has been measured with this draft: `eyas evaluate` does it."}

## Training

{_training(run)}
"""
    with atomic_file(folder / CARD) as beside:
        beside.write_text(text, encoding="utf-8")


def _commands(run: FinishedRun, named: str, tokens: int, folder: Path) -> str:
    """Say for each engine how it serves the draft, or why it does not; the default one comes first."""
    kind, troubles = run.drafter.name, run.facts("export").get("engine_troubles", {})
    said = []
    for info in sorted(engines_that(lambda info: info.serves), key=lambda info: info.name != SERVING_ENGINE):
        if info.title in troubles:
            said.append(f"Not in {info.title}: {troubles[info.title]}.")
        else:
            if oldest := info.least_version(kind, run.spec.read_layers):
                said.append(f"{info.title} {oldest} or later:")
            said.append(indent(info.short_command(kind, named, tokens, folder), "    "))
    return "\n\n".join(said)


def _measured(run: FinishedRun) -> str:
    rows = [(name, value.replace("|", "\\|")) for name, value in summary_rows(run)]
    # The target's name as its owner's disk has it is nobody's business.
    rows = [(name, value) for name, value in rows if name != "target"]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    others = "".join(f"\n- {name}: {value}" for name, value in other_evaluations(run))
    if others:
        others = f"\n\nMeasured with other settings:\n{others}"
    report, spec = run.evaluation, run.spec
    note = prediction_note(run)
    return (
        f"| | |\n| --- | --- |\n{table}\n\nDecoded by eyas itself, a chain of "
        f"K = {report['num_draft_tokens']}, batch 1, on {report['device']}, the target in {spec.dtype}. "
        "Speed there says nothing about a serving engine; acceptance does."
        + (f"\n\nNote: {note}" if note else "")
        + others
    )


def _training(run: FinishedRun) -> str:
    train, facts = run.config.train, run.facts("train")
    how = run.drafter.describe_training(run.config.draft)
    regenerate = run.config.regenerate
    limit = regenerate.max_new_tokens
    whose = (
        f"the target's own answers (temperature {regenerate.temperature:g}, up to {limit} tokens)"
        if regenerate.enabled
        else "answers as they stood in the data"
    )
    vocab_size = run.config.draft.vocab_size or run.spec.vocab_size
    counts = run.counts
    return "\n".join(
        (
            f"- {counts.get('train_supervised_tokens', 0):,} supervised tokens of {run.trained_on}, {whose}",
            f"- {train.num_epochs} epochs, {facts.get('num_steps', 0):,} steps, {how}, "
            f"learning rate {facts.get('learning_rate', train.learning_rate)}",
            f"- draft vocabulary of {vocab_size:,} tokens, which covers "
            f"{facts.get('coverage', 0):.2%} of the supervised ones",
        )
    )
