"""Open-loop arrivals: when requests come, and what is said of them."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from eyas.engines.base import Prompt, Sampling
from eyas.engines.decoder_base import Served
from eyas.engines.request_load import ClosedLoop, OpenLoop
from eyas.engines.spec_decode_metrics import SpecCounters
from eyas.serving.arrivals import arrival_times, measure_arrivals
from eyas.serving.timing import percentile
from eyas.types import Completion

PROMPTS = [Prompt(f"p{i}", (1, 2)) for i in range(4)]


def test_arrivals_come_at_their_rate_and_the_same_for_every_engine() -> None:
    times = arrival_times(20_000, 8.0, seed=3)
    assert times == arrival_times(20_000, 8.0, seed=3)
    assert times[0] == 0.0
    gaps = np.diff(times)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.05), "a Poisson process"


def test_an_open_loop_sends_what_has_arrived_however_many_are_open() -> None:
    load = OpenLoop(PROMPTS, [0.0, 1.0, 1.5, 9.0])
    assert load.due(0.2, 0) == [(PROMPTS[0], 0.0)]
    assert load.wait(0.4) == pytest.approx(0.6)
    assert load.due(2.0, 1) == [(PROMPTS[1], 1.0), (PROMPTS[2], 1.5)]
    assert load.due(8.0, 99) == []
    assert load.due(10.0, 99) == [(PROMPTS[3], 9.0)]
    assert load.due(11.0, 0) == []


def test_a_closed_loop_keeps_as_many_in_flight() -> None:
    load = ClosedLoop(PROMPTS, 3)
    assert [prompt.prompt_id for prompt, _ in load.due(0.0, 0)] == ["p0", "p1", "p2"]
    assert load.due(1.0, 3) == []
    assert load.due(2.5, 2) == [(PROMPTS[3], 2.5)]


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentile(values, 0.99) == 99.0
    assert percentile(values, 0.5) == 50.0
    assert percentile([7.0], 0.99) == 7.0


class Decoder:
    runner = "V2"
    deployment: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        self.asked: list[list[float]] = []

    def answer(self, prompts: Sequence[Prompt], concurrency: int, sampling: Sampling) -> Served:
        raise NotImplementedError

    def answer_at(self, prompts: Sequence[Prompt], arrivals_s: Sequence[float], sampling: Sampling) -> Served:
        self.asked.append(list(arrivals_s))
        answers = {p.prompt_id: Completion(p.prompt_id, (7, 8, 9), "stop") for p in prompts}
        first = [0.1 * len(self.asked)] * len(prompts)
        return Served(answers, 2.0, [1.0] * len(prompts), first, [0.01] * len(prompts))

    def counters(self) -> SpecCounters:
        return SpecCounters()

    def close(self) -> None:
        pass


def test_rates_are_served_in_turn_and_reported_over_all_rounds() -> None:
    decoder = Decoder()
    slow, fast = measure_arrivals(decoder, 3, PROMPTS, [2.0, 50.0], Sampling(4, seed=5), 2, "ngram")
    assert [times[-1] > 0.5 for times in decoder.asked] == [True, False, True, False]
    assert decoder.asked[0] != decoder.asked[2], "another draw each round"
    assert (slow.requests_per_s, slow.num_requests, slow.baseline) == (2.0, 8, "ngram")
    assert (slow.first_token_s, slow.first_token_p99_s) == pytest.approx((0.2, 0.3))
    assert (fast.first_token_s, fast.tokens_per_s, fast.inter_token_s) == pytest.approx((0.3, 6.0, 0.01))
