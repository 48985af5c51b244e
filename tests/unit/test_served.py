"""What is said about a served draft follows from its figures."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

from eyas.engines.base import Prompt
from eyas.evaluate.decode import Decoded
from eyas.evaluate.lossless import Lead, lead_over
from eyas.evaluate.served import ServingPoint, diagnose, recommend, same_length, with_speed_up
from eyas.stages.held_out import HeldOut, Here, agreement
from eyas.stages.measured import Measured
from eyas.train.metrics import Acceptance


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
    assert diagnose((2.0, 2.05), 2.02, (2.1, 2.1), True) == []
    assert diagnose((2.0, 2.05), 2.02, None, None) == []
    assert diagnose((2.0, 2.05), None, None, None) == []


@pytest.mark.parametrize(
    ("served", "reference", "of_stored", "same_text", "contract"),
    [
        ((2.0, 2.0), 2.0, (2.0, 2.3), True, "states"),
        ((1.3, 1.3), 2.0, (2.0, 2.0), True, "export"),
        ((1.3, 1.3), 2.0, None, None, "export"),
        ((2.0, 2.0), 2.0, (2.0, 2.0), False, "target"),
    ],
)
def test_the_contract_that_broke_is_named(
    served: tuple[float, float],
    reference: float | None,
    of_stored: tuple[float, float] | None,
    same_text: bool | None,
    contract: str,
) -> None:
    (said,) = diagnose(served, reference, of_stored, same_text)
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
    ("logits", "lead"),
    [
        ({7: 21.0, 9: 20.75, 3: 18.0}, Lead(21.0, 0.25)),  # the two at the top, nearly tied
        ({3: 21.5, 7: 21.0, 9: 20.75}, Lead(21.5, 0.75)),  # a third is above both
        ({7: 21.0, 3: 18.0}, Lead(21.0, math.inf)),  # the one found is nowhere near
    ],
)
def test_the_lead_at_a_difference_is_the_likeliest_tokens(logits: dict[int, float], lead: Lead) -> None:
    assert lead_over(logits, (7, 9)) == lead


def told(tokens: Sequence[int], acceptance: Acceptance | None = None) -> Decoded:
    return Decoded(list(tokens), 1.0, [Lead(20.0, 5.0)] * len(tokens), acceptance)


def rounds(*accepted: int) -> Acceptance:
    total = Acceptance.empty(2)
    for n in accepted:
        total.add_round(n)
    return total


def held_out_of(decoded: dict[str, tuple[int, ...]] | None, is_greedy: bool = False) -> HeldOut:
    """Three prompts with stored answers; of those decoded as stored, decoding accepts what is predicted."""
    stored = {"a": (1, 2, 3), "b": (4, 5), "c": (6, 7, 8)}
    predicted = {"a": rounds(2), "b": rounds(1), "c": rounds(0, 0)}
    prompts = [Prompt(name, (1,)) for name in stored]
    here = None
    if decoded is not None:
        drafted = {
            name: told(tokens, predicted[name] if tokens[:2] == stored[name][:2] else rounds(2, 2, 2))
            for name, tokens in decoded.items()
        }
        here = Here({name: told(tokens) for name, tokens in decoded.items()}, drafted, [])
    return HeldOut(prompts, stored, predicted, is_greedy, here)


def agreement_of(held_out: HeldOut, answers: dict[str, tuple[int, ...]], served: float, dtype: str) -> Any:
    measured = Measured([], alone={1: answers}, drafted={(2, 1): answers})
    return agreement(held_out, measured, (served, served), 2, dtype)


def test_the_stored_states_answer_only_for_answers_that_are_stored_as_decoded() -> None:
    answers = {"a": (1, 2, 3), "b": (4, 5, 9), "c": (6, 9, 9)}  # "c" parts from what is stored
    held_out = held_out_of(answers)
    length = 1 + (2 + 1 + 6) / 5
    found = agreement_of(held_out, answers, length, "bfloat16")
    assert (found["as_stored"], found["broken"]) == (2, [])
    assert found["in_process"] == pytest.approx(length)
    assert found["predicted"] == pytest.approx(1 + 3 / 4)
    wrong = dataclasses.replace(held_out, predicted=held_out.predicted | {"a": rounds(0, 0)})
    (said,) = agreement_of(wrong, answers, length, "bfloat16")["broken"]
    assert said.startswith("states: decoding in this process gives 2.500")


@pytest.mark.parametrize(
    ("answers", "dtype", "says"),
    [
        ({"a": (1, 2, 3), "b": (4, 5), "c": (6, 7, 8)}, "float32", "export"),
        ({"a": (1, 2, 3), "b": (4, 5), "c": (6, 9, 9)}, "float32", None),
        ({"a": (1, 2, 3), "b": (4, 5), "c": (6, 9, 9)}, "bfloat16", "export"),
        ({"a": (9, 2, 3), "b": (9, 5), "c": (6, 9, 9)}, "bfloat16", None),
    ],
)
def test_a_prediction_judges_the_engine_only_on_the_text_it_is_of(
    answers: dict[str, tuple[int, ...]], dtype: str, says: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    found = agreement_of(held_out_of(None), answers, 1.1, dtype)
    assert [said.split(":")[0] for said in found["broken"]] == ([says] if says else [])
    assert ("too few to hold the prediction against" in capsys.readouterr().err) == (says is None)


@pytest.mark.parametrize(("dtype", "says"), [("float32", ["answers"]), ("bfloat16", [])])
def test_answers_that_the_target_wrote_must_come_again_in_float32(dtype: str, says: list[str]) -> None:
    answers = {"a": (1, 2, 3), "b": (4, 5), "c": (6, 9, 9)}
    held_out = held_out_of(answers, is_greedy=True)
    decoded = held_out.total_decoded()
    assert decoded is not None
    found = agreement_of(held_out, answers, decoded.length, dtype)
    assert [said.split(":")[0] for said in found["broken"]] == says
