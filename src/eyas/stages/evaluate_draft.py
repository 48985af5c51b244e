"""evaluate --draft: any draft that eyas reads, measured with its target on prompts, without a run."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from eyas import registry
from eyas.config.load import LoadedConfig, load_config
from eyas.data.answer_slots import answer_slots
from eyas.data.benchmarks import read_benchmark
from eyas.data.chat import ChatRenderer
from eyas.drafters.common.stored import StoredDraft
from eyas.engines.base import Prompt
from eyas.engines.checks import check_abilities, check_evaluation, check_installed, is_served
from eyas.engines.info import engine_info
from eyas.errors import UserError
from eyas.evaluate.held_out import that_fit
from eyas.evaluate.in_process import Here, decode_here
from eyas.export.read import read_draft
from eyas.progress import say
from eyas.registry import REFERENCE_ENGINE
from eyas.report.page import context_rows
from eyas.report.serving_section import identical_of, served_rows
from eyas.serving.agreement import HeldOut
from eyas.serving.benchmark import ServedRun, free_memory, measure_served
from eyas.serving.fit import check_file, check_target, recorded_layers, recorded_target
from eyas.serving.report import check_report, evaluation_report, write_report
from eyas.serving.results import SO_FAR
from eyas.stages.init_from import start_folder
from eyas.stages.prepare import new_renderer
from eyas.stages.run_context import RunContext
from eyas.targets.teacher import read_teacher
from eyas.types import TargetSpec


def evaluate_draft(
    name: str, target: str | None, sources: Sequence[str], output: Path | None, settings: Sequence[str]
) -> dict[str, Any]:
    """Decode prompts of ``sources`` (or of evaluate.benchmarks); write and return report.json.

    Raises: UserError for what is no draft, or a draft of another target.
    """
    folder = start_folder(name, "--draft")
    draft = read_draft(folder)
    check_file(folder, draft)
    loaded = _settings(folder, draft, target, sources, output, settings)
    config = loaded.config
    check_abilities(config)
    check_evaluation(config.evaluate)
    check_installed(config, ["evaluate"])
    engine_info(config.evaluate.engine).check_draft(draft.architecture, draft.shape, recorded_layers(draft))
    spec = check_target(folder, draft, config.target, print_only=False)
    assert spec is not None
    context = RunContext(loaded)
    context.spec = spec
    renderer = new_renderer(context)
    asked = _prompts(config.evaluate.benchmarks or sources, config.evaluate.num_prompts, renderer)
    prompts = that_fit(asked, spec.max_position_embeddings - config.evaluate.max_new_tokens)
    here = _decode(context, draft, spec, prompts) if config.evaluate.in_process else None
    held_out, served = HeldOut(prompts, {}, {}, here), None
    config.run_dir.mkdir(parents=True, exist_ok=True)
    if is_served(config.evaluate):
        free_memory()
        (config.run_dir / SO_FAR).unlink(missing_ok=True)  # it does not say of which draft it is
        run = ServedRun(
            config, spec, renderer, context.target_folder, folder, context.samples_folder, config.run_dir
        )
        served = measure_served(run, held_out)
    report = evaluation_report(config.evaluate, spec.dtype, context.device, held_out, served)
    write_report(config.run_dir, report | {"draft": str(name), "target": config.target.model})
    check_report(report)
    say(f"evaluate: wrote {config.run_dir / 'report.json'}")
    return report


def print_draft(name: str, report: dict[str, Any]) -> None:
    """Print what was measured on stdout."""
    rows = [
        ("draft", name),
        ("evaluated on", f"{report['num_prompts']} prompts, greedy, up to {report['max_new_tokens']} tokens"),
        ("accepted, by position", ", ".join(f"{rate:.0%}" for rate in report["acceptance_rates"])),
        *context_rows(report),
        ("identical outputs", identical_of(report)),
        *(served_rows(report["served"]) if report["served"] else ()),
        ("acceptance length", f"{report['acceptance']:.3f} (K={report['num_draft_tokens']})"),
    ]
    width = max(len(title) for title, _ in rows)
    for title, value in rows:
        print(f"{title:<{width}}  {value}")


def _settings(
    folder: Path,
    stored: StoredDraft,
    target: str | None,
    sources: Sequence[str],
    output: Path | None,
    settings: Sequence[str],
) -> LoadedConfig:
    model = target or recorded_target(stored).get("model")
    if model is None:
        raise UserError(f"{folder} does not say which target it is for", hint="name it with --target")
    if not sources and not any(word.startswith("evaluate.benchmarks=") for word in settings):
        raise UserError(
            "there are no prompts to decode",
            hint="give --data FILE, or evaluate.benchmarks=[mt-bench,humaneval,gsm8k]",
        )
    words = (
        f"run_dir={output or Path('evaluations', folder.parent.name + '-' + folder.name)}",
        f"target.model={model}",
        "data.sources=[]",
        "regenerate.enabled=false",
        f"draft.architecture={stored.architecture}",
    )
    return load_config(None, (*words, *settings))


def _prompts(sources: Sequence[str], num: int, renderer: ChatRenderer) -> list[Prompt]:
    """Return the first turn of each dialogue."""
    found = [prompt for source in sources for prompt in read_benchmark(source, num, {})]
    return [
        Prompt(
            f"{p.suite}/{p.conversation.conversation_id}",
            tuple(renderer.prompt_ids(p.conversation, answer_slots(p.conversation)[0])),
        )
        for p in found
    ]


def _decode(context: RunContext, stored: StoredDraft, spec: TargetSpec, prompts: Sequence[Prompt]) -> Here:
    settings, device = context.config.evaluate, context.device
    teacher = read_teacher(context.target_folder, spec).to(device, torch.float32)
    own, embedding = stored.embedding, teacher.embedding.cpu().float()
    if own is not None and not torch.allclose(own.float(), embedding, rtol=1e-2, atol=1e-4):
        raise UserError("the draft has an embedding that is not this target's", hint="name its own --target")
    draft = stored.build(teacher.embedding.cpu(), teacher.head.cpu()).to(device).float()
    drafter, ids = registry.drafter(stored.architecture), stored.target_ids.to(device)
    start = engine_info(REFERENCE_ENGINE).start
    with closing(start(context.config, context.target_folder, spec, device)) as engine:
        return decode_here(
            engine,
            lambda: drafter.proposer(draft, ids),
            prompts,
            settings.num_draft_tokens,
            settings.max_new_tokens,
            spec.eos_token_ids,
        )
