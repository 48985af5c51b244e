"""What is said about a served draft follows from its figures."""

import pytest

from eyas.evaluate.served import ServingPoint, diagnose, recommend, same_length, with_speed_up


def point(k: int, concurrency: int, tokens_per_s: float, temperature: float = 0.0) -> ServingPoint:
    length = (2.0, 2.1) if k else None
    return ServingPoint(
        k, temperature, concurrency, 8, 1000, tokens_per_s, 1.0, 2.0, 0.1, length, [0.5] * k if k else None
    )


def test_lengths_agree_within_three_percent_of_their_bounds() -> None:
    assert same_length((2.0, 2.1), (2.15, 2.15))
    assert same_length((2.0, 2.1), (1.95, 1.95))
    assert not same_length((2.0, 2.1), (2.2, 2.2))
    assert not same_length((2.0, 2.1), (1.9, 1.9))
    nothing = (float("nan"), float("nan"))
    assert same_length(nothing, nothing)
    assert not same_length((2.0, 2.1), nothing)


def test_figures_that_agree_break_no_contract() -> None:
    assert diagnose((2.0, 2.05), 2.02, 2.02, True) == []
    assert diagnose((2.0, 2.05), 2.02, None, None) == []


@pytest.mark.parametrize(
    ("served", "predicted", "in_process", "same_text", "contract"),
    [
        ((2.0, 2.0), 2.3, 2.0, True, "states"),
        ((1.3, 1.3), 2.0, 2.0, True, "export"),
        ((1.3, 1.3), 2.0, None, None, "export"),
        ((2.0, 2.0), 2.0, 2.0, False, "target"),
    ],
)
def test_the_contract_that_broke_is_named(
    served: tuple[float, float],
    predicted: float,
    in_process: float | None,
    same_text: bool | None,
    contract: str,
) -> None:
    (said,) = diagnose(served, predicted, in_process, same_text)
    assert said.startswith(f"{contract}: ")


def test_speed_up_is_over_the_target_alone_under_the_same_conditions() -> None:
    points = with_speed_up(
        [point(0, 1, 100), point(0, 8, 400), point(0, 1, 90, 1.0), point(3, 1, 150), point(3, 8, 300),
         point(3, 1, 99, 1.0), point(3, 64, 1000)]
    )  # fmt: skip
    assert [p.speed_up for p in points] == [None, None, None, 1.5, 0.75, pytest.approx(1.1), None]


def test_the_recommended_k_is_the_one_that_gains_most_and_says_where_it_ends() -> None:
    points = with_speed_up(
        [point(0, 1, 100), point(0, 8, 700), point(0, 64, 4000), point(1, 1, 130), point(1, 8, 800),
         point(1, 64, 3900), point(3, 1, 180), point(3, 8, 900), point(3, 64, 3000)]
    )  # fmt: skip
    said = recommend(points)
    assert said == (
        "serve with K = 3: 1.80 times as fast at 1 request(s) at a time, 1.29 times at 8; "
        "from 64 on it no longer pays"
    )


def test_a_draft_that_never_pays_is_not_recommended() -> None:
    said = recommend(with_speed_up([point(0, 1, 100), point(1, 1, 90), point(3, 1, 70)]))
    assert said.startswith(
        "do not serve this draft here: at best it makes the target 0.90 times as fast (K = 1"
    )


def test_another_k_that_is_best_somewhere_is_mentioned() -> None:
    points = with_speed_up(
        [
            point(0, 1, 100),
            point(0, 8, 100),
            point(1, 1, 110),
            point(1, 8, 120),
            point(3, 1, 190),
            point(3, 8, 110),
        ]
    )
    assert recommend(points).endswith("it pays wherever it was measured (best elsewhere: K = 1)")


def test_nothing_is_recommended_without_the_target_alone() -> None:
    assert "no recommendation" in recommend(with_speed_up([point(3, 1, 100)]))


@pytest.mark.parametrize(
    ("logprobs", "gap"),
    [
        ({7: -1.0, 9: -1.25, 3: -4.0}, 0.25),  # the two at the top, nearly tied
        ({3: -0.5, 7: -1.0, 9: -1.25}, 0.75),  # a third is above both
        ({7: -1.0, 3: -4.0}, float("inf")),  # the one found is nowhere near
    ],
)
def test_the_gap_of_a_difference_is_to_the_likeliest_token(logprobs: dict[int, float], gap: float) -> None:
    from eyas.evaluate.lossless import FirstDifference
    from eyas.stages.served import _with_gap

    parted = FirstDifference("p", 4, 7, 9, float("inf"))
    assert _with_gap(parted, logprobs).gap == gap
    ended = FirstDifference("p", 4, 7, -1, float("inf"))
    assert _with_gap(ended, logprobs).gap == float("inf")
