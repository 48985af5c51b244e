"""Timed rounds of an engine: every shape warmed up, concurrencies in turn, medians and spread.

A round answers all prompts at one concurrency. What an engine compiles for a shape is paid in the warm-up;
what changes while it runs (clocks, other processes) meets all concurrencies alike.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from eyas.engines.base import Prompt, Sampling
from eyas.engines.decoder_base import Decoder, Served
from eyas.engines.spec_decode_metrics import SpecCounters
from eyas.serving.recommend import ServingPoint


@dataclass
class Rounds:
    """The timed rounds at one concurrency, and what the engine counted in each (empty: the target alone)."""

    served: list[Served] = field(default_factory=list)
    counted: list[SpecCounters] = field(default_factory=list)


def sweep_of(concurrency: Sequence[int], num_prompts: int) -> list[int]:
    """Return the concurrencies that can be measured, ascending: never more requests than prompts."""
    return [c for c in sorted(set(concurrency)) if c <= num_prompts] or [num_prompts]


def warm_up(decoder: Decoder, prompts: Sequence[Prompt], sweep: Sequence[int], sampling: Sampling) -> None:
    """Answer as many prompts as are in flight at each concurrency, at full length, untimed."""
    for concurrency in reversed(sweep):
        decoder.answer(prompts[:concurrency], concurrency, sampling)


def time_rounds(
    decoder: Decoder,
    drafts: bool,
    prompts: Sequence[Prompt],
    sweep: Sequence[int],
    sampling: Sampling,
    num_rounds: int,
) -> dict[int, Rounds]:
    """Return the timed rounds by concurrency, each round of which goes over the whole sweep."""
    found = {concurrency: Rounds() for concurrency in sweep}
    for _ in range(num_rounds):
        for concurrency, rounds in found.items():
            before = decoder.counters() if drafts else None
            rounds.served.append(decoder.answer(prompts, concurrency, sampling))
            if before is not None:
                rounds.counted.append(decoder.counters() - before)
    return found


def point_of(
    rounds: Rounds, num_draft_tokens: int, concurrency: int, temperature: float, baseline: str | None = None
) -> ServingPoint:
    """Return the median of the rounds' rates with their spread, and percentiles over all their requests."""
    served = rounds.served
    rates = [one.tokens_per_s for one in served]
    latencies = [s for one in served for s in one.latencies_s]
    first = [s for one in served for s in one.first_token_s]
    gaps = [s for one in served for s in one.inter_token_s]
    num_answers = sum(len(one.answers) for one in served)
    counted = sum(rounds.counted[1:], rounds.counted[0]) if rounds.counted else None
    return ServingPoint(
        num_draft_tokens=num_draft_tokens,
        temperature=temperature,
        concurrency=concurrency,
        num_prompts=len(served[0].answers),
        num_tokens=served[0].num_tokens,
        tokens_per_s=statistics.median(rates),
        latency_s=statistics.median(latencies),
        latency_p95_s=percentile(latencies, 0.95),
        first_token_s=statistics.median(first) if first else None,
        acceptance_length=counted.lengths(sum(s.num_tokens for s in served), num_answers)
        if counted
        else None,
        acceptance_rates=counted.rates if counted else None,
        tokens_per_s_range=(min(rates), max(rates)),
        first_token_p99_s=percentile(first, 0.99) if first else None,
        inter_token_s=statistics.median(gaps) if gaps else None,
        inter_token_p99_s=percentile(gaps, 0.99) if gaps else None,
        baseline=baseline,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
