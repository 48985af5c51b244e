"""Open-loop load: requests arrive at a rate, whether or not the engine keeps up, as users do.

Times between arrivals are exponential (a Poisson process), from the run's seed, the same for all engines that
are compared. Of each request: the time to the first token, from its arrival, and the times between later
outputs (an output is what a round yields: with a draft, often several tokens). ``vllm bench serve
--request-rate`` reports the same quantities over HTTP.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eyas.engines.base import Prompt, Sampling
from eyas.engines.decoder_base import OpenLoopDecoder, Served
from eyas.serving.timing import percentile


@dataclass(frozen=True)
class ArrivalPoint:
    """All prompts at one rate of arrival, every round of it. K = 0 is the target alone."""

    num_draft_tokens: int
    baseline: str | None
    requests_per_s: float
    num_requests: int
    tokens_per_s: float  # median of the rounds
    first_token_s: float
    first_token_p99_s: float
    inter_token_s: float | None  # None where each answer came at once
    inter_token_p99_s: float | None
    latency_s: float
    latency_p99_s: float


def measure_arrivals(
    decoder: OpenLoopDecoder,
    num_draft_tokens: int,
    prompts: Sequence[Prompt],
    rates: Sequence[float],
    sampling: Sampling,
    num_rounds: int,
    baseline: str | None = None,
) -> list[ArrivalPoint]:
    """Serve all prompts at each rate, the rates in turn, as often as there are rounds."""
    found: dict[float, list[Served]] = {rate: [] for rate in rates}
    for number in range(num_rounds):
        for rate, served in found.items():
            times = arrival_times(len(prompts), rate, sampling.seed + number)
            served.append(decoder.answer_at(prompts, times, sampling))
    points = []
    for rate, served in found.items():
        first = [s for one in served for s in one.first_token_s]
        gaps = [s for one in served for s in one.inter_token_s]
        latencies = [s for one in served for s in one.latencies_s]
        points.append(
            ArrivalPoint(
                num_draft_tokens,
                baseline,
                rate,
                len(latencies),
                statistics.median(one.tokens_per_s for one in served),
                statistics.median(first),
                percentile(first, 0.99),
                statistics.median(gaps) if gaps else None,
                percentile(gaps, 0.99) if gaps else None,
                statistics.median(latencies),
                percentile(latencies, 0.99),
            )
        )
    return points


def arrival_times(num: int, rate: float, seed: int) -> list[float]:
    """Return seconds after the start at which ``num`` requests arrive, the first at 0."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, num - 1)
    return [0.0, *np.cumsum(gaps).tolist()]
