"""One engine or server, measured over temperatures and concurrency, and one held-out prompt at a time."""

import statistics
from collections.abc import Sequence

from eyas.config.schema import EvaluateSettings
from eyas.engines.base import Prompt, Sampling
from eyas.engines.decoder_base import Decoder, Served
from eyas.errors import UserError
from eyas.progress import say
from eyas.serving.recommend import ServingPoint
from eyas.serving.results import HELD_OUT, ServingResults
from eyas.serving.sampling import sample_answers


def measure(
    decoder: Decoder, k: int | None, measured: ServingResults, settings: EvaluateSettings, seed: int
) -> None:
    """Answer all prompts at each temperature and concurrency; ``k`` None: a server, 0: the target alone."""
    prompts = measured.prompts
    sweep = [c for c in sorted(set(settings.concurrency)) if c <= len(prompts)] or [len(prompts)]
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
        if temperature > 0 and k is not None:
            measured.sampled[k, temperature] = sample_answers(
                decoder, prompts, sweep[-1], temperature, seed + 1_000_000 * k
            )
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
