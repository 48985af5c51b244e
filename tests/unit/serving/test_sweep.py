"""An engine is measured at each temperature and concurrency; one that drafts another K is refused."""

from collections.abc import Sequence

import pytest

from eyas.config.schema import EvaluateSettings
from eyas.engines.base import Prompt, Sampling
from eyas.engines.decoder_base import Served
from eyas.engines.spec_decode_metrics import SpecCounters
from eyas.errors import UserError
from eyas.serving.report import served_results
from eyas.serving.results import HELD_OUT, Group, ServingResults
from eyas.serving.sweep import measure
from eyas.types import Completion

SETTINGS = EvaluateSettings(
    num_draft_tokens=2, max_new_tokens=4, concurrency=(1, 2, 64), temperatures=(0.7,), timed_rounds=2,
    engine="vllm",
)  # fmt: skip


class Decoder:
    """Answers every prompt with three tokens in two rounds, each of which accepts one of ``k`` tokens."""

    def __init__(self, k: int) -> None:
        self.k, self.rounds, self.seconds = k, 0, 1.0
        self.asked: list[tuple[int, int, float]] = []

    def answer(self, prompts: Sequence[Prompt], concurrency: int, sampling: Sampling) -> Served:
        self.asked.append((len(prompts), concurrency, sampling.temperature))
        self.rounds += 2 * len(prompts)
        answers = {p.prompt_id: Completion(p.prompt_id, (7, 8, 9), "stop") for p in prompts}
        self.seconds *= 1.5  # each answer takes longer than the one before
        return Served(answers, seconds=self.seconds / concurrency, latencies_s=[0.1] * len(prompts))

    def counters(self) -> SpecCounters:
        at = (self.rounds, *[0] * (self.k - 1)) if self.k else None
        return SpecCounters(self.rounds, self.rounds, at)

    def close(self) -> None:
        pass


def results() -> ServingResults:
    prompts = [Prompt(f"p{i}", (1, 2)) for i in range(3)]
    return ServingResults([Group(HELD_OUT, "all", prompts[:2]), Group("s", "a", prompts[2:])])


def test_greedy_is_always_measured_and_more_requests_than_prompts_never() -> None:
    decoder, measured = Decoder(2), results()
    measure(decoder, 2, measured, SETTINGS, seed=5)
    assert [(p.temperature, p.concurrency) for p in measured.points] == [(0, 1), (0, 2), (0.7, 1), (0.7, 2)]
    assert measured.points[0].acceptance_length == (1.0, 2.0)
    assert decoder.asked[:2] == [(2, 2, 0.0), (1, 1, 0.0)], "a warm-up of each concurrency"
    assert decoder.asked[2:6] == [(3, 1, 0.0), (3, 2, 0.0)] * 2, "rounds in turn, not one after another"
    slowest, fastest = 9 / 1.5**5, 9 / 1.5**3
    assert measured.points[0].tokens_per_s_range == pytest.approx((slowest, fastest))
    assert measured.points[0].tokens_per_s == pytest.approx((slowest + fastest) / 2)
    assert set(measured.drafted) == {(2, 1), (2, 2)}
    assert {c["suite"] for c in measured.categories} == {HELD_OUT, "s"}


def test_held_out_prompts_are_counted_one_at_a_time() -> None:
    measured = results()
    measure(Decoder(2), 2, measured, SETTINGS, seed=5)
    assert set(measured.singly) == {"p0", "p1"}
    assert measured.singly["p0"] == ((7, 8, 9), SpecCounters(2, 2, (2, 0)))


def test_the_target_alone_has_no_acceptance_and_another_k_no_single_answers() -> None:
    measured = results()
    measure(Decoder(0), 0, measured, SETTINGS, seed=5)
    measure(Decoder(5), 5, measured, SETTINGS, seed=5)
    assert set(measured.alone) == {1, 2}
    assert [p.acceptance_length is None for p in measured.points] == [True] * 4 + [False] * 4
    assert measured.singly == {}


def test_a_server_that_drafts_another_number_is_refused() -> None:
    with pytest.raises(UserError, match=r"drafts 5 tokens a round, evaluate\.num_draft_tokens is 2"):
        measure(Decoder(5), None, results(), SETTINGS, seed=5)
    measure(Decoder(2), None, results(), SETTINGS, seed=5)


def test_the_headline_results_are_greedy() -> None:
    measured = results()
    measure(Decoder(2), 2, measured, SETTINGS, seed=5)
    points = [vars(p) for p in measured.points]
    for row in (*points, *measured.categories):
        if row["temperature"]:
            row |= {"tokens_per_s": -1.0, "acceptance_length": (-1.0, -1.0)}
    served = {
        "categories": measured.categories[::-1],
        "points": points[::-1],
        "lossless": {"identical_held_out": 2},
    }
    found = served_results(served, 2)
    assert found["acceptance"] == 1.0
    assert found["drafted_tokens_per_s"] > 0
    assert found["plain_tokens_per_s"] is None
