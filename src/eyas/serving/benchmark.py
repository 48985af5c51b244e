"""The draft in the engine that will serve it: acceptance by its own counters, speed over concurrency and K.

Every number is of the same prompts: held-out ones, and benchmarks whose later turns follow the target's own
earlier answers. The target alone is measured under the same conditions.
"""

import dataclasses
import gc
import platform
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import eyas
from eyas.config.schema import EvaluateSettings, RunConfig
from eyas.data.chat import ChatRenderer
from eyas.engines.decoder_base import Decoder, OpenLoopDecoder
from eyas.engines.endpoint_checks import check_greedy
from eyas.engines.endpoint_decoder import EndpointDecoder
from eyas.engines.info import engine_info
from eyas.evaluate.two_samples import broken_by_sampling
from eyas.progress import say
from eyas.serving.agreement import Compared, HeldOut, agreement, compare_answers, writer_of
from eyas.serving.dialogues import answer_turns, benchmark_groups, longest_length
from eyas.serving.recommend import ServingPoint, recommend, with_speed_up
from eyas.serving.results import HELD_OUT, SO_FAR, Group, ServingResults
from eyas.serving.sampling import compare_sampled
from eyas.serving.sweep import measure, measure_baseline
from eyas.types import TargetSpec


@dataclass(frozen=True)
class ServedRun:
    """What a draft is measured with; ``folder`` is the evaluation's."""

    config: RunConfig
    spec: TargetSpec
    renderer: ChatRenderer
    target_folder: Path
    draft_folder: Path
    samples_folder: Path
    folder: Path


def measure_served(run: ServedRun, held_out: HeldOut) -> dict[str, Any]:
    """Return what ``evaluation/report.json`` holds under ``served``.

    Raises: UserError before the first engine starts when something cannot be measured.
    """
    settings, max_positions = run.config.evaluate, run.spec.max_position_embeddings
    written_by = writer_of(run.config, run.samples_folder)
    so_far, conditions = run.folder / SO_FAR, conditions_of(run.config)
    measured = ServingResults.load(so_far, conditions)
    if measured is None:
        if so_far.exists():
            say("evaluate: discarding earlier results: different machine or version, or unreadable file")
        benchmarks = benchmark_groups(settings, run.config.data.role_map)
        measured = ServingResults([Group(HELD_OUT, "all", list(held_out.prompts)), *benchmarks])
    else:
        say(f"evaluate: with K = {', '.join(map(str, measured.done))} it was measured before")
    compared = Compared([])
    deployment: dict[str, str] | None = None
    for served_as, decoder in _decoders(run, measured):
        with closing(decoder):
            if isinstance(decoder, OpenLoopDecoder):
                measured.runners[str(served_as)] = decoder.runner
                deployment = dict(decoder.deployment)
            if any(group.dialogues for group in measured.groups):
                measured.left_out += answer_turns(
                    decoder, measured.groups, run.renderer, settings, max_positions
                )
            if isinstance(served_as, str):
                measure_baseline(decoder, served_as, measured, settings, run.config.seed)
            else:
                measure(decoder, served_as, measured, settings, run.config.seed)
            if not served_as:
                compared = compare_answers(measured, held_out.here, decoder)
        if served_as:
            measured.done.append(served_as)
            measured.save(so_far, conditions)
    points = with_speed_up(sorted(measured.points, key=_order))
    sampled = compare_sampled(measured)
    agreed = agreement(held_out, measured, written_by, run.spec.dtype)
    return {
        "engine": settings.endpoint or _engine_and_version(settings.engine),
        "num_prompts": len(measured.prompts),
        "left_out": measured.left_out,
        "points": [dataclasses.asdict(p) for p in points],
        "arrivals": [dataclasses.asdict(p) for p in measured.arrivals],
        "runners": measured.runners,
        "deployment": deployment,
        "categories": measured.categories,
        "lossless": {
            "compared": compared.answers,
            "identical_held_out": _num_identical(held_out, compared) if compared.answers else None,
            "differences": [vars(d) for d in compared.differences],
            "rounding": compared.rounding(),
        },
        "sampled": sampled,
        "agreement": agreed | {"broken": [*agreed["broken"], *broken_by_sampling(sampled)]},
        "recommendation": recommend(points),
    }  # fmt: skip


def _order(point: ServingPoint) -> tuple[Any, ...]:
    return point.baseline or "", point.num_draft_tokens, point.temperature, point.concurrency


def _num_identical(held_out: HeldOut, compared: Compared) -> int:
    return len(held_out.stored.keys() - {d.prompt_id for d in compared.differences})


def conditions_of(config: RunConfig) -> dict[str, Any]:
    """Return what measurements depend on besides the stage's inputs."""
    name = config.evaluate.engine
    section = engine_info(name).section
    return {
        "eyas": eyas.__version__,
        "engine": _engine_and_version(name),
        "seed": config.seed,
        "settings": getattr(config, section).model_dump(mode="json") if section else None,
        "machine": platform.node(),
    }


def _engine_and_version(name: str) -> str:
    return f"{name} {engine_info(name).installed().version or 'unknown'}"


def _decoders(run: ServedRun, measured: ServingResults) -> Iterator[tuple[int | str | None, Decoder]]:
    """Start the engines that are not done, the target alone last; or take the server there is."""
    settings, spec = run.config.evaluate, run.spec
    if settings.endpoint:
        server = EndpointDecoder(
            settings.endpoint,
            spec,
            run.renderer.tokenizer,
            end_of_turn_id=run.renderer.end_of_turn_id(),
            timeout_s=run.config.regenerate.timeout_s,
        )
        check_greedy(server.engine, measured.prompts, settings.max_new_tokens)
        yield None, server
        return
    info = engine_info(settings.engine)
    baselines = {name: info.baseline(name, run.target_folder, spec) for name in settings.baselines}
    wanted = {settings.num_draft_tokens, *settings.sweep_draft_tokens} - set(measured.done)
    todo: list[int | str] = [*sorted(wanted), *(name for name in baselines if name not in measured.done), 0]
    for served_as in todo:
        say(f"evaluate: starting {info.title} with {_what_drafts(served_as)}")
        baseline = baselines[served_as] if isinstance(served_as, str) else None
        k = settings.num_draft_tokens if isinstance(served_as, str) else served_as
        yield (
            served_as,
            info.start_decoder(
                run.config,
                run.target_folder,
                spec,
                draft=run.draft_folder if k and baseline is None else None,
                num_draft_tokens=k,
                max_length=longest_length(
                    measured.groups, run.renderer, settings.max_new_tokens, spec.max_position_embeddings
                ),
                max_concurrency=_most_requests(settings, len(measured.prompts)),
                **({} if baseline is None else {"kind": baseline}),
            ),
        )


def _what_drafts(served_as: int | str) -> str:
    if isinstance(served_as, str):
        return served_as
    return f"the draft, K = {served_as}" if served_as else "the target alone"


def _most_requests(settings: EvaluateSettings, num_prompts: int) -> int:
    """Return how many requests may be open; those that arrive at a rate may all be."""
    return max(*settings.concurrency, num_prompts if settings.request_rates else 1)


def free_memory() -> None:
    """Give back what this process holds of a device beyond what it still uses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
