"""What is said about a served draft follows from its figures."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from eyas.config.schema import RunConfig
from eyas.drafters.common.acceptance import Acceptance
from eyas.engines.base import Prompt
from eyas.engines.spec_decode_metrics import SpecCounters
from eyas.evaluate.decode import Decoded
from eyas.evaluate.in_process import Here
from eyas.serving.agreement import HeldOut, Writer, agreement, compare_answers, others_wrote
from eyas.serving.recommend import ServingPoint, diagnose, recommend, recommended, same_length, with_speed_up
from eyas.serving.results import Group, ServingResults


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
    nothing = float("nan")
    assert diagnose((nothing, nothing), nothing, (nothing, nothing), None) == []


@pytest.mark.parametrize(
    ("served", "reference", "of_states", "same_text", "contract"),
    [
        ((2.0, 2.0), 2.0, (2.0, 2.3), True, "states"),
        ((1.3, 1.3), 2.0, (2.0, 2.0), True, "export"),
        ((1.3, 1.3), 2.0, None, None, "export"),
        ((2.0, 2.0), 2.0, (2.0, 2.0), False, "target"),
    ],
)
def test_the_contract_that_broke_is_named(
    served: tuple[float, float],
    reference: float,
    of_states: tuple[float, float] | None,
    same_text: bool | None,
    contract: str,
) -> None:
    (said,) = diagnose(served, reference, of_states, same_text)
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


def ranged(k: int, concurrency: int, low: float, high: float) -> ServingPoint:
    middle = point(k, concurrency, (low + high) / 2)
    return ServingPoint(**(vars(middle) | {"tokens_per_s_range": (low, high)}))


def test_settings_within_the_spread_of_the_best_are_recommended_as_a_set() -> None:
    alone = [point(0, 1, 100), point(0, 8, 400)]
    drafted = [
        *(ranged(3, 1, 180, 190), ranged(3, 8, 500, 520)),
        *(ranged(5, 1, 175, 183), ranged(5, 8, 490, 505)),
        *(ranged(1, 1, 140, 150), ranged(1, 8, 450, 460)),
    ]
    said = recommend(with_speed_up([*alone, *drafted]))
    assert said.startswith("serve with K = 3 (or 5: no slower within the spread of the rounds): 1.85 times")
    assert "elsewhere" not in said
    # The same draft on another day: the order within the spread changes, the set does not.
    later = [
        *(ranged(5, 1, 180, 186), ranged(5, 8, 500, 512)),
        *(ranged(3, 1, 178, 187), ranged(3, 8, 495, 510)),
        *(ranged(1, 1, 140, 150), ranged(1, 8, 450, 460)),
    ]
    assert set(recommended(later_with_speed_up := with_speed_up([*alone, *later])[2:])) == {3, 5}
    assert recommended(later_with_speed_up)[0] == 5


def test_the_best_baseline_is_named_next_to_the_draft() -> None:
    baseline = {"baseline": "ngram"}
    points = [point(0, 1, 100), point(3, 1, 190), ServingPoint(**(vars(point(3, 1, 130)) | baseline))]
    said = recommend(with_speed_up(points))
    assert said.startswith("serve with K = 3: 1.90 times")
    assert said.endswith(
        ". Without training, ngram makes it 1.30 times as fast at 1, where the draft reaches 1.90"
    )


def test_nothing_is_recommended_without_the_target_alone() -> None:
    assert "no recommendation" in recommend(with_speed_up([point(3, 1, 100)]))


def rounds(*accepted: int) -> Acceptance:
    total = Acceptance.empty(2)
    for n in accepted:
        total.add_round(n)
    return total


STORED = {"a": (1, 2, 3), "b": (4, 5), "c": (6, 7, 8)}
PREDICTED = {"a": rounds(2), "b": rounds(1), "c": rounds(0, 0)}
Answers = Mapping[str, tuple[int, ...]]


def held_out_of(decoded: Answers | None = None, **predicted: Acceptance) -> HeldOut:
    """Three prompts. An answer decoded as it is stored takes the rounds that should be predicted."""
    here = None
    if decoded is not None:
        drafted = {
            name: Decoded(
                list(ids),
                1.0,
                (),
                PREDICTED[name] if ids[: len(STORED[name])] == STORED[name] else rounds(2, 2),
            )
            for name, ids in decoded.items()
        }
        likely = (dict.fromkeys(range(10), 20.0),) * 4  # everything is a near-tie
        here = Here({name: Decoded(list(ids), 1.0, likely) for name, ids in decoded.items()}, drafted, [])
    prompts = [Prompt(name, (1,)) for name in STORED]
    return HeldOut(prompts, STORED, PREDICTED | predicted, here)


def agreement_of(
    held_out: HeldOut,
    answers: Answers,
    served: Mapping[str, Acceptance],
    dtype: str,
    written_by: Writer = "others",
) -> Any:
    singly = {
        name: (ids, SpecCounters(served[name].num_rounds, sum(served[name].accepted_at)))
        for name, ids in answers.items()
    }
    alone = {name: tuple(a.token_ids) for name, a in held_out.here.plain.items()} if held_out.here else {}
    measured = ServingResults([], alone={1: alone} if alone else {}, singly=singly)
    return agreement(held_out, measured, written_by, dtype)


def contracts(found: Any) -> list[str]:
    return [said.split(":")[0] for said in found["broken"]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lengths_are_compared_of_the_same_text_only(dtype: str) -> None:
    decoded = {"a": (1, 2, 3), "b": (4, 5, 9), "c": (6, 9, 9)}  # "c" parts from what is stored
    served = decoded | {"b": (4, 1, 9)}  # and the engine's "b" from what is decoded
    counts = {"a": rounds(2), "b": rounds(0, 0, 0), "c": rounds(2, 2)}
    found = agreement_of(held_out_of(decoded), served, counts, dtype)
    assert found["broken"] == []
    assert found["compared"] == 2
    assert found["served"] == pytest.approx([6 / 3 - 2 / 3, 1 + 6 / 3])
    assert found["reference"] == pytest.approx(1 + 6 / 3)
    wrong = agreement_of(held_out_of(decoded), served, counts | {"c": rounds(0, 0, 0, 0, 0)}, dtype)
    assert contracts(wrong) == ["export"]
    wrong = agreement_of(held_out_of(decoded, a=rounds(0, 0)), served, counts, dtype)
    assert contracts(wrong) == ["states"]
    # The states of "c" answer for another text than the decoded one.
    assert agreement_of(held_out_of(decoded, c=rounds(2, 2, 2)), served, counts, dtype)["broken"] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("answers", "counts", "says"),
    [
        ({"a": (1, 2, 3), "b": (4, 5), "c": (6, 7, 8)}, PREDICTED, []),
        ({"a": (1, 2, 3), "b": (4, 5), "c": (6, 9, 9)}, PREDICTED | {"c": rounds(2, 2, 2)}, []),
        ({"a": (1, 2, 3), "b": (4, 5), "c": (6, 9, 9)}, PREDICTED | {"a": rounds(0, 0, 0)}, ["export"]),
        ({"a": (9, 2, 3), "b": (9, 5), "c": (6, 9, 9)}, PREDICTED, []),
    ],
)
def test_without_decoding_here_the_prediction_judges_the_text_it_is_of(
    answers: Answers, counts: Mapping[str, Acceptance], says: list[str], dtype: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("INFO", logger="eyas")
    found = agreement_of(held_out_of(), answers, counts, dtype)
    assert contracts(found) == says
    nothing = answers["a"] != STORED["a"]
    assert (found["served"] is None) == nothing
    assert ("none of the answers that are stored" in caplog.text) == nothing


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize(("num_others", "says"), [(0, []), (1, []), (2, ["answers"]), (3, ["answers"])])
def test_half_of_the_answers_of_a_server_begin_so_again(
    num_others: int, says: list[str], is_here: bool
) -> None:
    answers = {n: (9, *ids[1:]) if i < num_others else ids for i, (n, ids) in enumerate(STORED.items())}
    held_out = held_out_of(answers if is_here else None)
    counts = {n: rounds(2, 2) if ids != STORED[n] else PREDICTED[n] for n, ids in answers.items()}
    assert contracts(agreement_of(held_out, answers, counts, "bfloat16", "server")) == says


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("answer", "likely", "says"),
    [
        ((6, 7, 8), {}, []),
        ((6, 7, 9, 9), {8: 20.0, 9: 20.0}, []),  # a tie
        ((6, 7, 9), {8: 5.0, 9: 20.0}, ["answers"]),
        ((6, 7), {8: 20.0, 9: 20.0}, ["answers"]),  # it ends where the stored one goes on
    ],
)
def test_what_an_engine_of_the_run_wrote_is_written_again(
    answer: tuple[int, ...], likely: dict[int, float], says: list[str], dtype: str
) -> None:
    answers = STORED | {"c": answer}
    held_out = held_out_of(answers)
    assert held_out.here is not None
    held_out.here.plain["c"] = Decoded(list(answer), 1.0, (likely,) * 4)
    alone = {1: {name: tuple(plain.token_ids) for name, plain in held_out.here.plain.items()}}
    singly = {n: (ids, SpecCounters(2, 2)) for n, ids in answers.items() if n != "c"}
    singly |= {
        "a": (STORED["a"], SpecCounters(1, 2)),
        "b": (STORED["b"], SpecCounters(1, 1)),
        "c": ((), SpecCounters()),
    }
    found = agreement(held_out, ServingResults([], alone=alone, singly=singly), "target", dtype)
    assert contracts(found) == says


def test_an_engine_that_counts_no_rounds_is_found_out() -> None:
    answers = dict(STORED)
    counts = dict.fromkeys(STORED, Acceptance.empty(2))
    assert agreement_of(held_out_of(answers), answers, counts, "float32")["broken"] == [
        "export: the engine counts no rounds: it does not decode with the draft"
    ]
    none = held_out_of(None, a=Acceptance.empty(2), b=Acceptance.empty(2), c=Acceptance.empty(2))
    found = agreement_of(none, answers, counts, "float32")
    assert (found["broken"], found["served"], found["reference"]) == ([], None, None)


def test_an_answer_that_is_cut_short_or_empty_is_not_the_stored_one() -> None:
    held_out = held_out_of()
    assert held_out.as_stored({"a": (1, 2), "b": (), "c": (6, 7, 8, 9)}) == ["c"]


class Target:
    """An engine's target: after (1, 5), tokens 3 and 4 are a near-tie, after (1, 8) they are not."""

    def next_token_logits(self, before: Sequence[int]) -> dict[int, float]:
        return {3: 20.0, 4: 19.9 if before[-1] == 5 else 1.0}


def test_each_difference_is_judged_where_it_is() -> None:
    prompts = Group("held out", "all", [Prompt("a", (1,))])
    alone = {1: {"a": (5, 3)}, 16: {"a": (8, 3)}}
    drafted = {(2, 1): {"a": (5, 4)}, (2, 16): {"a": (8, 4)}}
    measured = ServingResults([prompts], alone=alone, drafted=drafted)
    result = compare_answers(measured, None, Target())
    found, compared = result.differences, result.answers
    assert compared == 2
    assert [(d.top, d.gap) for d in found] == [(20.0, pytest.approx(0.1)), (20.0, 19.0)]
    ended = ServingResults([prompts], alone=alone, drafted={(2, 1): {"a": (5,)}})
    assert [(d.top, d.gap) for d in compare_answers(ended, None, Target()).differences] == [(None, None)]
    alone = ServingResults([prompts], alone={16: {"a": (5, 3)}}, singly={"a": ((5, 7), SpecCounters(1, 0))})
    assert [(d.found, d.gap) for d in compare_answers(alone, None, Target()).differences] == [(7, None)]


def test_a_server_is_judged_by_the_target_here() -> None:
    here = Here({"a": Decoded([5, 3], 1.0, ({5: 20.0}, {3: 20.0, 4: 19.9}))}, {}, [])
    prompts = Group("held out", "all", [Prompt("a", (1,)), Prompt("of a benchmark", (2,))])
    drafted = {(2, 1): {"a": (5, 4), "of a benchmark": (1,)}, (2, 16): {"a": (5, 7), "of a benchmark": (2,)}}
    result = compare_answers(ServingResults([prompts], drafted=drafted), here, None)
    found, compared = result.differences, result.answers
    assert compared == 2
    assert [(d.found, d.gap) for d in found] == [(4, pytest.approx(0.1)), (7, None)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, None),
        ({"regenerate": {"endpoint": "http://127.0.0.1:1/v1"}}, None),
        ({"regenerate": {"enabled": False}}, "the answers in the data"),
        ({"regenerate": {"temperature": 0.7}}, "answers sampled at temperature 0.7"),
        ({"regenerate": {"extra_body": {"top_p": 0.9}}}, "answers of a server that was asked with"),
        ({"extract": {"prepared_data": "rows.jsonl"}}, "samples from elsewhere"),
    ],
)
def test_whose_the_stored_answers_are(settings: dict[str, Any], says: str | None) -> None:
    least = {"run_dir": "run", "target": {"model": "m"}, "data": {"sources": ["rows.jsonl"]}}
    config = RunConfig.model_validate(least | settings)
    found = others_wrote(config)
    assert (found or "").startswith(says or "")
    assert (found is None) == (says is None)
