"""evaluate: decoding with the exported draft, compared with the target alone and the prediction."""

import dataclasses
import functools
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch

from eyas.data.benchmarks import benchmark_fingerprint
from eyas.drafters.common.acceptance import Acceptance
from eyas.engines.base import Prompt
from eyas.engines.checks import is_served
from eyas.errors import ContractError
from eyas.evaluate.acceptance import predict_rounds
from eyas.evaluate.held_out import choose_samples, first_answer, prompt_of
from eyas.evaluate.in_process import Here, decode_here, sample_here
from eyas.evaluations import bring_back, keep_other
from eyas.files import fingerprint
from eyas.progress import say
from eyas.registry import REFERENCE_ENGINE
from eyas.report.examples import examples_of
from eyas.report.serving_section import identical_of
from eyas.serving.agreement import HeldOut
from eyas.serving.benchmark import ServedRun, free_memory, measure_served
from eyas.serving.report import check_report, evaluation_report, write_report
from eyas.serving.results import SO_FAR
from eyas.stages.export import is_whole, read_exported
from eyas.stages.prepare import new_renderer
from eyas.stages.results import write_results
from eyas.stages.run_context import RunContext, begin, finish, write_settings
from eyas.store.aux_subset import with_layers
from eyas.targets.teacher import read_teacher


def evaluate(context: RunContext) -> None:
    """Decode held-out prompts with and without the draft; write report.json and check the outputs.

    Evaluations with other settings are kept; the report and the card are of this one, and name the others.
    """
    _evaluate(context)
    write_results(context)


def _evaluate(context: RunContext) -> None:
    settings, spec = context.config.evaluate, context.spec
    inputs = {
        "draft": context.output_of("export"),
        "states": context.output_of("extract"),
        "evaluate": context.loaded.recorded["evaluate"],
    }
    if settings.benchmarks:
        inputs["benchmarks"] = [benchmark_fingerprint(name) for name in settings.benchmarks]
    brought_back = bring_back(context.config.run_dir, inputs)
    context.may_differ |= {"evaluate"}
    if not begin(context, "evaluate", inputs):
        if brought_back:  # then run.yaml is that of another evaluation
            write_settings(context, "evaluate", context.records())
        return
    if not is_whole(context):
        raise ContractError(
            f"{context.folder('export')} is not what was exported and verified",
            hint="run the same eyas export again; it writes the folder anew",
        )
    held_out = _measure_here(context)
    served = None
    if is_served(settings):
        free_memory()  # the engine wants the device to itself
        served = measure_served(_served_run(context), held_out)
    report = evaluation_report(settings, spec.dtype, context.device, held_out, served)
    here = held_out.here
    if here is not None:
        pairs = [(list(p.token_ids), here.drafted[p.prompt_id]) for p in held_out.prompts]
        report["examples"] = examples_of(context.tokenizer, pairs)
    folder = context.folder("evaluate")
    write_report(folder, report)
    if served is not None:
        (folder / SO_FAR).unlink(missing_ok=True)  # also where a check below fails: it is measured anew then
    check_report(report)
    keep_other(context.config.run_dir, inputs)
    finish(context, "evaluate", fingerprint(report["acceptance"]), report=report)
    if here is not None:
        others = "; the others part at near-ties" if here.differences else ""
        say(f"evaluate: {identical_of(report)} answers are the target's own, token for token{others}")
    if served is not None:
        say(f"evaluate: {served['recommendation']}")


def _measure_here(context: RunContext) -> HeldOut:
    """Choose the prompts; predict their acceptance, and decode them if that is asked for."""
    settings, spec = context.config.evaluate, context.spec
    teacher = read_teacher(context.target_folder, spec).to(context.device, torch.float32)
    drafter, draft, target_ids = read_exported(context, teacher)
    states = context.store("held_out")
    indices = choose_samples(states, settings.num_prompts, settings.max_new_tokens, spec.eos_token_ids)
    samples = [states.sample(index) for index in indices]
    prompts = [prompt_of(sample) for sample in samples]
    here = None
    if settings.in_process:
        here = _decode(context, prompts, functools.partial(drafter.proposer, draft, target_ids))
    rounds = predict_rounds(
        drafter,
        draft,
        teacher,
        target_ids,
        with_layers(states, context.draft_spec.aux_layer_ids),
        indices,
        settings.num_draft_tokens,
        settings.max_new_tokens,
    )
    names = [prompt.prompt_id for prompt in prompts]
    stored = [first_answer(sample)[: settings.max_new_tokens] for sample in samples]
    return HeldOut(
        prompts,
        dict(zip(names, stored, strict=True)),
        {n: Acceptance.of(r, settings.num_draft_tokens) for n, r in zip(names, rounds, strict=True)},
        here,
        dict(zip(names, rounds, strict=True)),
    )


def _decode(context: RunContext, prompts: Sequence[Prompt], new_proposer: Any) -> Here:
    settings = context.config.evaluate
    k, eos = settings.num_draft_tokens, context.spec.eos_token_ids
    with closing(context.make_engine(REFERENCE_ENGINE, context.draft_spec)) as engine:
        here = decode_here(engine, new_proposer, prompts, k, settings.max_new_tokens, eos)
        seed = context.config.seed
        sampled = [
            sample_here(engine, new_proposer, prompts, k, temperature, seed, eos)
            for temperature in settings.temperatures
            if temperature > 0
        ]
    return dataclasses.replace(here, sampled=tuple(sampled))


def _served_run(context: RunContext) -> ServedRun:
    return ServedRun(
        context.config,
        context.spec,
        new_renderer(context),
        context.target_folder,
        draft_folder=context.folder("export"),
        samples_folder=context.samples_folder,
        folder=context.folder("evaluate"),
    )
