"""Rounds are counted in the range of contexts in which they start."""

from eyas.drafters.common.acceptance import Acceptance
from eyas.evaluate.contexts import by_context


def test_a_round_counts_where_it_starts_and_an_answer_may_cross_a_bound() -> None:
    # Rounds of the first answer start at 2046, 2047 and 2050; that of the second far behind every bound.
    found = by_context([(2046, [0, 2, 1]), (40_000, [2])], 2)
    assert found == {
        "0-2k": Acceptance(2, (1, 1)),
        "2-4k": Acceptance(1, (1, 0)),
        "32k and above": Acceptance(1, (1, 1)),
    }


def test_a_bound_belongs_to_the_range_that_it_starts() -> None:
    names = [next(iter(by_context([(tokens, [0])], 1))) for tokens in (2047, 2048, 4096, 8192, 16384, 32768)]
    assert names == ["0-2k", "2-4k", "4-8k", "8-16k", "16-32k", "32k and above"]


def test_answers_without_rounds_are_in_no_range() -> None:
    assert by_context([(10, [])], 3) == {}
