"""The model card beside a draft: what it is for, how it was made, what was measured and how."""

import json
from pathlib import Path

import yaml

import eyas
from eyas import registry
from eyas.drafters.serving import vllm_file
from eyas.files import atomic_file
from eyas.report.page import prediction_note, summary_rows
from eyas.stages.run_context import RunContext, facts_of

_NAME = "README.md"


def write_card(context: RunContext) -> Path:
    """Write README.md into the draft's folder and return its path; unmeasured drafts say so."""
    target = context.config.target.model
    local = target.startswith((".", "/", "~", "demo:"))
    front = {
        "pipeline_tag": "text-generation",
        "tags": [context.drafter.name, "speculative-decoding", "eyas"],
        **({} if local else {"base_model": target}),
    }
    named = Path(target).name if local and not target.startswith("demo:") else target
    evaluated = bool(facts_of(context, "evaluate").get("done"))
    tokens = context.config.evaluate.num_draft_tokens
    layers = ", ".join(map(str, context.draft_spec.aux_layer_ids))
    text = f"""\
---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# {context.drafter.title} draft for {named}

A draft model for speculative decoding: it proposes tokens that {named} verifies, so that the answers are the
target's own and come faster. It is of no use alone. Made by eyas {eyas.__version__}.

## Serve it

{_vllm(context, named, tokens)}

{_sglang(context, named, tokens)}

It reads the target's hidden states after layers {layers}; engines take them from config.json.

## Measured

{_measured(context) if evaluated else "Nothing has been measured with this draft: `eyas evaluate` does it."}

## Training

{_training(context)}
"""
    path = context.folder("export") / _NAME
    with atomic_file(path) as beside:
        beside.write_text(text, encoding="utf-8")
    return path


def _vllm(context: RunContext, named: str, tokens: int) -> str:
    kind = context.drafter.name
    if not registry.has_drafter_file(kind, "vllm"):
        return "vLLM does not serve it."
    speculative = json.dumps(vllm_file(kind).speculative_config("THIS_FOLDER", tokens))
    return f"    vllm serve {named} \\\n      --speculative-config '{speculative}'"


def _sglang(context: RunContext, named: str, tokens: int) -> str:
    trouble = facts_of(context, "export").get("sglang_trouble")
    if trouble:
        return f"In vLLM only: {trouble}."
    words = registry.drafter_file(context.drafter.name, "sglang").arguments("THIS_FOLDER", tokens)
    pairs = [" ".join(words[i : i + 2]) for i in range(0, len(words), 2)]
    lines = [f"python -m sglang.launch_server --model-path {named} {pairs[0]}"]
    lines += [f"  {' '.join(pairs[i : i + 2])}" for i in range(1, len(pairs), 2)]
    return "    " + " \\\n    ".join(lines)


def _measured(context: RunContext) -> str:
    rows = [(name, value.replace("|", "\\|")) for name, value in summary_rows(context)]
    # The target's name as its owner's disk has it is nobody's business.
    rows = [(name, value) for name, value in rows if name != "target"]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    report, spec = facts_of(context, "evaluate")["report"], context.spec
    note = prediction_note(context)
    return (
        f"| | |\n| --- | --- |\n{table}\n\nDecoded by eyas itself, a chain of "
        f"K = {report['num_draft_tokens']}, batch 1, on {report['device']}, the target in {spec.dtype}. "
        "Speed there says nothing about a serving engine; acceptance does."
        + (f"\n\nNote: {note}" if note else "")
    )


def _training(context: RunContext) -> str:
    train, facts = context.config.train, facts_of(context, "train")
    how = context.drafter.describe_training(context.config.draft)
    regenerate = context.config.regenerate
    limit = regenerate.max_new_tokens
    whose = (
        f"the target's own answers (temperature {regenerate.temperature:g}, up to {limit} tokens)"
        if regenerate.enabled
        else "answers as they stood in the data"
    )
    vocab_size = context.config.draft.vocab_size or context.spec.vocab_size
    counts = facts_of(context, context.samples_stage).get("counts", {})
    return "\n".join(
        (
            f"- {counts.get('train_supervised_tokens', 0):,} supervised tokens of "
            f"{counts.get('train_conversations', 0):,} conversations, {whose}",
            f"- {train.num_epochs} epochs, {facts.get('num_steps', 0):,} steps, {how}, "
            f"learning rate {train.learning_rate:g}",
            f"- draft vocabulary of {vocab_size:,} tokens, which covers "
            f"{facts.get('coverage', 0):.2%} of the supervised ones",
        )
    )
