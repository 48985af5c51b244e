"""Intervals of acceptance lengths hold what they promise, on simulated prompts."""

import numpy as np
import pytest

from eyas.drafters.common.acceptance import Acceptance
from eyas.evaluate.bootstrap import difference_interval, length_interval
from eyas.report.difference import difference_text
from eyas.serving.report import prompts_of


def prompts(
    num: int, mean: float, generator: np.random.Generator, spread: float = 0.3
) -> dict[str, Acceptance]:
    """Return prompts whose chance of acceptance varies from one to the next, as real ones do."""
    found = {}
    for i in range(num):
        chance = float(np.clip(generator.normal(mean, spread), 0.02, 0.98))
        rounds = int(generator.integers(20, 60))
        found[f"p{i}"] = Acceptance(rounds, (int(generator.binomial(rounds, chance)),))
    return found


def test_the_interval_holds_the_true_length_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    truth = 1 + np.mean([sum(p.accepted_at) / p.num_rounds for p in prompts(20_000, 0.5, generator).values()])
    inside = 0
    for _ in range(200):
        low, high = length_interval(list(prompts(40, 0.5, generator).values())) or (0.0, 0.0)
        inside += low <= truth <= high
    assert 178 <= inside <= 199


def test_prompts_that_are_all_alike_leave_no_doubt() -> None:
    assert length_interval([Acceptance(10, (5, 2))] * 4) == pytest.approx((1.7, 1.7))


@pytest.mark.parametrize("num", [0, 1, 2])
def test_too_few_prompts_have_no_interval(num: int) -> None:
    assert length_interval([Acceptance(10, (5,))] * num) is None
    few = {f"p{i}": Acceptance(10, (5,)) for i in range(num)}
    assert difference_interval(few, few) is None


def test_prompts_without_a_round_are_left_out() -> None:
    assert length_interval([Acceptance(0, (0,))] * 9 + [Acceptance(10, (5,))] * 2) is None


def test_two_seeds_of_one_recipe_are_called_different_as_rarely_as_promised() -> None:
    generator = np.random.default_rng(2)
    called = 0
    for _ in range(200):
        before, after = (prompts(30, 0.5, generator) for _ in range(2))
        low, high = difference_interval(before, after) or (-1.0, 1.0)
        called += low > 0 or high < 0
    assert called <= 20


def test_on_the_same_prompts_a_small_true_difference_is_found_where_other_prompts_hide_it() -> None:
    generator = np.random.default_rng(3)
    before = prompts(30, 0.5, generator)
    after = {
        n: Acceptance(p.num_rounds, (min(p.num_rounds, p.accepted_at[0] + 3),)) for n, p in before.items()
    }
    low, _ = difference_interval(before, after) or (0.0, 0.0)
    assert low > 0
    others = {f"q{n}": p for n, p in after.items()}
    low, high = difference_interval(before, others) or (0.0, 0.0)
    assert low < 0 < high


def test_a_report_says_whether_a_difference_is_real() -> None:
    generator = np.random.default_rng(4)

    def report(mean: float) -> dict[str, object]:
        found = prompts(30, mean, generator, spread=0.05)
        held = {"decoded": {name: vars(p) for name, p in found.items()}}
        return {"num_draft_tokens": 1, "acceptance": 1 + mean, "prompts": held}

    first = report(0.4)
    assert len(prompts_of(first)) == 30
    assert str(difference_text(first, report(0.6))).endswith("real")
    assert str(difference_text(first, report(0.4))).endswith("may be chance")
    assert difference_text(first, report(0.4) | {"num_draft_tokens": 2}) == "another number of draft tokens"
    assert difference_text(first, {"num_draft_tokens": 1, "acceptance": 1.0}) is None, "of an earlier version"
