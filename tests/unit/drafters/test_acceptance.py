import math

import pytest
import torch

from eyas.drafters.common.acceptance import Acceptance, replay, replay_answers


def test_a_round_that_accepts_nothing_still_gives_one_token() -> None:
    result = replay([0, 0, 0], [3, 3, 3], 3)
    assert (result.num_rounds, result.accepted_at, result.length) == (3, (0, 0, 0), 1.0)


def test_a_round_jumps_over_what_it_accepted_and_the_targets_own_token() -> None:
    # Row 0 accepts two tokens, the target adds one, so row 3 is next.
    result = replay([2, 9, 9, 1, 9], [3, 3, 3, 2, 1], 3)
    assert (result.num_rounds, result.accepted_at) == (2, (2, 1, 0))
    assert result.length == 1 + 3 / 2


def test_no_more_is_accepted_than_was_drafted() -> None:
    assert replay([7, 7, 7], [7, 7, 7], 2).accepted_at == (1, 1)


def test_nothing_is_accepted_behind_the_answers_end() -> None:
    assert replay([3, 3], [2, 1], 3).accepted_at == (1, 1, 0)


@pytest.mark.parametrize(
    ("limit", "rounds", "accepted"), [(1, 0, 0), (2, 1, 1), (3, 1, 2), (5, 1, 3), (6, 2, 4)]
)
def test_a_token_limit_ends_the_answer(limit: int, rounds: int, accepted: int) -> None:
    result = replay([3] * 9, [3] * 9, 3, max_new_tokens=limit)
    assert (result.num_rounds, sum(result.accepted_at)) == (rounds, accepted)


def test_a_limit_beyond_the_answers_end_changes_nothing() -> None:
    assert replay([0, 1, 0], [3, 2, 1], 3, max_new_tokens=9) == replay([0, 1, 0], [3, 2, 1], 3)


def test_every_token_of_an_answer_comes_from_one_place() -> None:
    # The first from prefill, and from each round those accepted plus one of the target's.
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        num_rows = int(torch.randint(1, 30, (), generator=generator))
        accepted = torch.randint(0, 5, (num_rows,), generator=generator).tolist()
        depth = [num_rows - j for j in range(num_rows)]
        result = replay([min(a, d) for a, d in zip(accepted, depth, strict=True)], depth, 4)
        produced = 1 + result.num_rounds + sum(result.accepted_at)
        # A last round that accepts all that is left gives no further token.
        assert num_rows + 1 <= produced <= num_rows + 2


def test_answers_of_a_batch_are_replayed_apart() -> None:
    rows = torch.tensor([3, 4, 5, 9, 10])
    accepted, depth = torch.tensor([0, 1, 1, 2, 1]), torch.tensor([3, 2, 1, 2, 1])
    first, second = replay_answers(rows, accepted, depth, 3)
    assert first == replay([0, 1, 1], [3, 2, 1], 3)
    assert second == replay([2, 1], [2, 1], 3)
    assert replay_answers(rows[:0], accepted[:0], depth[:0], 3) == []


def test_acceptance_adds_up_before_it_divides() -> None:
    a, b = Acceptance(10, (8, 2)), Acceptance(2, (0, 0))
    assert (a + b).length == 1 + 10 / 12
    assert (a + b).rates == [8 / 12, 2 / 12]


def test_no_rounds_have_no_acceptance_length() -> None:
    assert math.isnan(Acceptance.empty(3).length)


def test_both_of_two_sums_count() -> None:
    assert Acceptance(10, (8, 2)) + Acceptance(2, (1, 1)) == Acceptance(12, (9, 3))
    assert Acceptance() == Acceptance(0, ())


def test_rates_without_a_round_are_zero() -> None:
    assert Acceptance.empty(2).rates == [0, 0]
    assert Acceptance(1, (1, 0)).rates == [1, 0]


def test_a_token_limit_holds_for_every_answer_of_a_batch() -> None:
    rows, three = torch.tensor([3, 4, 5, 9, 10]), torch.full((5,), 3)
    assert [a.num_rounds for a in replay_answers(rows, three, three, 3, max_new_tokens=2)] == [1, 1]
    assert [sum(a.accepted_at) for a in replay_answers(rows, three, three, 3, max_new_tokens=2)] == [1, 1]
    assert [sum(a.accepted_at) for a in replay_answers(rows, three, three, 3)] == [3, 2]
