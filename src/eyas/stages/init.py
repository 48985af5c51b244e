"""init: a run file that a person can read, with the settings worth knowing and why."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from eyas.config.load import load_config
from eyas.config.paths import paths_to
from eyas.errors import UserError
from eyas.files import atomic_file
from eyas.plan.parallel import tensor_parallel
from eyas.plan.requirements import num_gpus_here
from eyas.progress import say

_TEMPLATE = """\
# Written by eyas init. Every setting: eyas config --keys; what this run would do: eyas plan -c {output}
run_dir: {run_dir}

target:
  model: {target}{target_note}

data:
  sources: {sources}   # files, folders, globs, hf:owner/name:split
  max_length: {max_length}        # tokens of a sample at most; longer ones are cut
  validation_fraction: 0.05    # conversations kept to measure acceptance

regenerate:
  # The target answers the prompts itself: the draft learns what it will have to predict. false: train on
  # the answers in the data, if the target wrote them.
  enabled: true
  max_new_tokens: {max_new_tokens}
{regenerate}
extract:
{extract}
draft:
  vocab_size: {vocab_size}      # the tokens the draft can propose: those most used in the answers
  ttt_steps: {unroll}           # steps of the draft on its own states in training

train:
  num_epochs: 3
  batch_tokens: {batch_tokens}
{train}
evaluate:
  num_draft_tokens: 3     # as you will serve it: num_speculative_tokens
  max_new_tokens: {decoded}
"""
_GPU_REGENERATE = """\
  engine: vllm
  # A server that runs already is used instead with: endpoint: http://127.0.0.1:8000/v1
"""
_GPU_EXTRACT = """\
  engine: vllm

vllm:
  tensor_parallel_size: {tp}   # GPUs that hold one copy of the target: {tp_basis}
  gpu_memory_utilization: 0.9

"""
_GPU_FLEET = """\
  # With Ray installed, several copies capture at once:
  # fleet: {{replicas: {replicas}, gpus_per_replica: {tp}}}
"""
_GPU_TRAIN = """\
  compute_dtype: bfloat16 # masters and optimizer stay in float32
  num_gpus: {gpus}
  batches_per_step: {gpus}     # one for each GPU; a step is as many times train.batch_tokens
"""
_CPU_TARGET = "\n  dtype: float32          # answers with and without the draft are then identical"
_CPU_EXTRACT = """\
  engine: transformers    # vllm on GPUs

"""


def init(
    target: str | None, data: Sequence[str], gpus: int | None, run_dir: str | None, output: Path
) -> None:
    """Write ``output``; what is not given is asked on a terminal.

    Raises: UserError when something is missing and nobody can be asked, or when the file is there.
    """
    if output.exists():
        raise UserError(f"{output} is there already", hint="name another file with -o")
    target = target or _ask(
        "target", "Which model is to be sped up (folder, hub id, or demo:smollm2-135m-instruct)?"
    )
    data = data or [_ask("data", "Where are conversations or prompts (file, folder or hf:owner/name:split)?")]
    if gpus is None:
        gpus = int(_ask("gpus", "How many GPUs may be used?", str(num_gpus_here())))
    name = re.sub(r"[^a-z0-9.]+", "-", target.rsplit("/", 1)[-1].removeprefix("demo:").lower()).strip("-")
    written: dict[str, Any] = {
        "target": {"model": target},
        "data": {"sources": list(data)},
        "run_dir": run_dir,
    }
    paths_to(output.parent, written)
    text = _TEMPLATE.format(
        output=output,
        run_dir=json.dumps(written["run_dir"] or f"runs/{name}"),
        target=json.dumps(written["target"]["model"]),
        target_note="" if gpus else _CPU_TARGET,
        sources=json.dumps(written["data"]["sources"]),
        max_length=2048 if gpus else 512,
        max_new_tokens=512 if gpus else 96,
        regenerate=_GPU_REGENERATE if gpus else "  batch_size: 64\n",
        extract=_gpu_extract(target, gpus) if gpus else _CPU_EXTRACT,
        vocab_size=32000 if gpus else 4096,
        decoded=128 if gpus else 64,
        unroll=7 if gpus else 3,
        batch_tokens=8192 if gpus else 512,
        train=_GPU_TRAIN.format(gpus=gpus) if gpus else "",
    )  # fmt: skip
    with atomic_file(output) as beside:
        beside.write_text(text, encoding="utf-8")
        load_config(beside)  # what we write must be valid
    say(f"init: wrote {output}")
    say(f"next: eyas doctor -c {output}, eyas plan -c {output}, eyas run -c {output}")


def _gpu_extract(target: str, gpus: int) -> str:
    tp, basis = tensor_parallel(target, gpus)
    text = _GPU_EXTRACT.format(tp=tp, tp_basis=basis)
    if tp == gpus:
        return text
    fleet = _GPU_FLEET.format(replicas=gpus // tp, tp=tp)
    return text.replace("  engine: vllm\n", f"  engine: vllm\n{fleet}", 1)


def _ask(flag: str, question: str, default: str | None = None) -> str:
    if not sys.stdin.isatty():
        raise UserError(f"--{flag} is missing, and there is no terminal to ask on", hint=f"give --{flag}")
    return str(click.prompt(question, default=default, err=True))
