"""One engine or server, measured over temperatures and concurrency, and one held-out prompt at a time."""

from eyas.config.schema import EvaluateSettings
from eyas.engines.base import Sampling
from eyas.engines.decoder_base import Decoder, OpenLoopDecoder
from eyas.errors import UserError
from eyas.progress import say
from eyas.serving.arrivals import measure_arrivals
from eyas.serving.recommend import ServingPoint
from eyas.serving.results import HELD_OUT, ServingResults
from eyas.serving.sampling import sample_answers
from eyas.serving.timing import Rounds, point_of, sweep_of, time_rounds, warm_up


def measure(
    decoder: Decoder, k: int | None, measured: ServingResults, settings: EvaluateSettings, seed: int
) -> None:
    """Answer all prompts at each temperature and concurrency; ``k`` None: a server, 0: the target alone."""
    drafted = settings.num_draft_tokens if k is None else k
    name = "as served" if k is None else f"K = {k}" if k else "the target alone"
    for temperature in _temperatures(settings):
        sampling = Sampling(settings.max_new_tokens, temperature, seed)
        timed = _timed(decoder, drafted, measured, settings, sampling, name)
        for concurrency, rounds in timed.items():
            if k is None:
                _check_same_k(drafted, point_of(rounds, drafted, concurrency, temperature))
            if temperature == 0:
                answers = {n: tuple(answer.token_ids) for n, answer in rounds.served[0].answers.items()}
                if k == 0:
                    measured.alone[concurrency] = answers
                else:
                    measured.drafted[drafted, concurrency] = answers
        if temperature == 0 and drafted == settings.num_draft_tokens:
            _measure_singly(decoder, measured, sampling)
        if temperature > 0 and k is not None:
            measured.sampled[k, temperature] = sample_answers(
                decoder, measured.prompts, max(timed), temperature, seed + 1_000_000 * k
            )
        if drafted:
            for group in measured.groups:
                (rounds,) = time_rounds(decoder, True, group.prompts, [max(timed)], sampling, 1).values()
                point = point_of(rounds, drafted, max(timed), temperature)
                kept = {key: vars(point)[key] for key in _CATEGORY_KEYS}
                measured.categories.append({"suite": group.suite, "category": group.category, **kept})


def measure_baseline(
    decoder: Decoder, baseline: str, measured: ServingResults, settings: EvaluateSettings, seed: int
) -> None:
    """Time what drafts without training under the conditions of the draft."""
    for temperature in _temperatures(settings):
        sampling = Sampling(settings.max_new_tokens, temperature, seed)
        _timed(decoder, settings.num_draft_tokens, measured, settings, sampling, baseline, baseline)


def _temperatures(settings: EvaluateSettings) -> list[float]:
    return sorted({0.0, *settings.temperatures})


def _timed(
    decoder: Decoder,
    drafted: int,
    measured: ServingResults,
    settings: EvaluateSettings,
    sampling: Sampling,
    name: str,
    baseline: str | None = None,
) -> dict[int, Rounds]:
    """Warm up and time each concurrency, then each rate of arrival; keep the points, return the rounds."""
    prompts, num_rounds = measured.prompts, settings.timed_rounds
    sweep = sweep_of(settings.concurrency, len(prompts))
    warm_up(decoder, prompts, sweep, sampling)
    timed = time_rounds(decoder, drafted > 0, prompts, sweep, sampling, num_rounds)
    for concurrency, rounds in timed.items():
        point = point_of(rounds, drafted, concurrency, sampling.temperature, baseline)
        measured.points.append(point)
        say(
            f"  {name}, temperature {sampling.temperature:g}, {concurrency} at a time: "
            f"{point.tokens_per_s:,.0f} tokens/s ({point.slowest:,.0f} to {point.fastest:,.0f})"
        )
    if sampling.temperature == 0 and settings.request_rates:
        assert isinstance(decoder, OpenLoopDecoder)
        rates = settings.request_rates
        measured.arrivals += measure_arrivals(
            decoder, drafted, prompts, rates, sampling, num_rounds, baseline
        )
    return timed


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
