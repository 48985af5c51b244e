"""Near-ties are rounding only as long as they are few and go both ways."""

import pytest

from eyas.errors import ContractError
from eyas.evaluate.lossless import check_rounding, first_difference, num_compared
from eyas.evaluate.near_ties import (
    most_differences,
    rounding_report,
    rounding_trouble,
    share_of_large_gaps,
)


def test_a_thousand_of_a_thousand_answers_that_part_are_not_rounding() -> None:
    trouble = rounding_trouble(1000, 1000 * 20)
    assert trouble is not None
    assert "1000 of 20000 compared tokens (5.0%)" in trouble


def test_measured_rates_of_honest_engines_are_rounding() -> None:
    assert rounding_trouble(49, 80 * 150) is None  # SmolLM2 in bfloat16, 31 of 80 answers equal
    assert rounding_trouble(100, 744 * 60) is None


def test_few_answers_may_part_by_chance() -> None:
    assert rounding_trouble(1, 30) is None
    assert most_differences(0) == 0


def test_differences_that_all_go_one_way_are_not_rounding() -> None:
    trouble = rounding_trouble(20, 100_000, [-0.1] * 20)
    assert trouble is not None
    assert "prefers its own token" in trouble
    assert "prefers the other token" in (rounding_trouble(20, 100_000, [0.1] * 20) or "")


def test_differences_of_both_signs_or_exact_ties_are_rounding() -> None:
    assert rounding_trouble(20, 100_000, [-0.1] * 19 + [0.05]) is None
    assert rounding_trouble(20, 100_000, [-0.1] * 19 + [0.0]) is None


def test_one_sign_of_few_differences_says_nothing() -> None:
    assert rounding_trouble(19, 100_000, [-0.1] * 19) is None


def test_the_share_of_large_gaps_counts_those_above_an_eighth() -> None:
    assert share_of_large_gaps([0.0, 0.125, 0.25, 0.5]) == 0.5
    assert share_of_large_gaps([]) is None


def test_an_evaluation_whose_answers_part_too_often_is_refused() -> None:
    report = rounding_report(1000, 20_000, [1.0] * 1000, [])
    assert report["share_of_large_gaps"] == 1.0
    with pytest.raises(ContractError, match=r"1000 of 20000 compared tokens"):
        check_rounding(report, "bfloat16")
    check_rounding(rounding_report(40, 20_000, [0.1] * 40, [-0.1, 0.1] * 20), "bfloat16")
    check_rounding(None, "bfloat16")


def test_tokens_are_compared_up_to_the_first_difference() -> None:
    assert num_compared(first_difference("a", [1, 2, 3], [1, 5, 3]), [1, 2, 3]) == 2
    assert num_compared(None, [1, 2, 3]) == 3
