"""Where the check of last states draws its lines: relative entropy, rows judged, norms of either kind."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from test_final_state_check import SPEC, TEACHER, WIDTH, answered, sample

from eyas.capture.final_state_check import FinalStateCheck, _surprise, count_misses
from eyas.capture.states_batch import StatesBatch
from eyas.errors import ContractError
from eyas.targets.teacher import TeacherHead
from eyas.types import HiddenStates, TokenizedSample


@pytest.mark.parametrize(("found", "usual"), [(0.5, 0.1), (0.9, 0.02), (0.3, 0.25), (1.0, 0.02)])
def test_surprise_is_the_relative_entropy_of_two_shares(found: float, usual: float) -> None:
    other = (1 - found) * math.log((1 - found) / (1 - usual)) if found < 1 else 0
    assert _surprise(found, usual) == pytest.approx(found * math.log(found / usual) + other)
    assert _surprise(found, usual) > 0


@pytest.mark.parametrize(("found", "usual"), [(0.0, 0.02), (0.02, 0.02), (0.01, 0.02)])
def test_no_more_misses_than_usual_are_no_surprise(found: float, usual: float) -> None:
    assert _surprise(found, usual) == 0


def misses(num: int, num_rows: int) -> HiddenStates:
    """Return states of which ``num`` of ``num_rows`` rows prefer another token of the answer."""
    ids = np.arange(num_rows + 1, dtype=np.int32) % WIDTH
    one = TokenizedSample("a", ids, np.ones(num_rows + 1, dtype=bool), cut=False)
    tokens = np.roll(ids, -1)
    tokens[:num] = np.roll(ids, -2)[:num]
    last = 3 * torch.eye(WIDTH)[torch.from_numpy(tokens).long()] + 0.01
    aux = torch.randn(num_rows + 1, 2, WIDTH)
    return HiddenStates.select(one, aux, last)


@pytest.mark.parametrize(("num", "is_refused"), [(9, False), (10, False), (11, True), (12, True)])
def test_misses_of_less_than_one_chance_in_a_billion_are_refused(num: int, is_refused: bool) -> None:
    """The bound in nats is 21: of 30 rows, where one in fifty is usual, it lies between 10 and 11 misses."""
    assert (30 * _surprise(num / 30, 0.02) > 21) == is_refused
    check = FinalStateCheck(SPEC, TEACHER, 0.02, against_all=True)
    states = misses(num, 30)
    assert count_misses([states], TEACHER, True) == [(num, 30)]
    if is_refused:
        with pytest.raises(ContractError, match=f"{num} of 30 last states do not predict"):
            check(StatesBatch.of([states]))
    else:
        check(StatesBatch.of([states]))


@pytest.mark.parametrize("num_rows", [95, 96, 97, 192, 193, 300])
def test_rows_of_a_long_answer_are_judged_evenly_up_to_a_limit(num_rows: int) -> None:
    ((_, judged),) = count_misses([misses(0, num_rows)], TEACHER, against_all=True)
    assert judged == {95: 95, 96: 96, 97: 49, 192: 96, 193: 65, 300: 75}[num_rows]
    ((_, judged),) = count_misses([misses(0, 257)], TEACHER, against_all=False)
    assert judged <= 129


@pytest.mark.parametrize(("length", "counts"), [(17, True), (16, False)])
def test_an_answer_of_sixteen_rows_calibrates_and_one_of_fewer_does_not(length: int, counts: bool) -> None:
    known = misses(0, length - 1)
    assert (FinalStateCheck.calibrated(SPEC, TEACHER, [known]).usual_misses is not None) == counts


def normed_states(teacher: TeacherHead, num_rows: int) -> HiddenStates:
    one = dataclasses.replace(sample(1, num_rows), sample_id="n")
    raw = torch.randn(num_rows, 3, WIDTH)
    return HiddenStates.select(one, raw[:, :2], teacher.normed(raw[:, 2]))


WAVE = 0.3 * torch.sin(torch.arange(WIDTH))
WEIGHTS = {"rms": 1 + WAVE, "rms_one_plus": WAVE}


@pytest.mark.parametrize("kind", ["rms", "rms_one_plus"])
@pytest.mark.parametrize("size", [1.0, 20.0])
def test_states_after_the_final_norm_are_refused_for_either_kind_of_norm(kind: str, size: float) -> None:
    weight = WEIGHTS[kind] if kind == "rms_one_plus" else size * WEIGHTS[kind]
    teacher = dataclasses.replace(TEACHER, norm_kind=kind, norm_weight=weight)  # type: ignore[arg-type]
    check = FinalStateCheck(SPEC, teacher, None)
    with pytest.raises(ContractError, match="after the final norm"):
        check(StatesBatch.of([normed_states(teacher, 8)]))
    check(StatesBatch.of([answered(1)]))


def test_weights_that_are_next_to_nothing_do_not_hide_the_norm() -> None:
    weight = torch.full((WIDTH,), 2.0)
    weight[5] = 1e-9
    teacher = dataclasses.replace(TEACHER, norm_weight=weight)
    one, raw = sample(1, 8), torch.sign(torch.randn(8, 3, WIDTH))
    states = HiddenStates.select(one, raw[:, :2], teacher.normed(raw[:, 2]) + 1e-3)
    with pytest.raises(ContractError, match="after the final norm"):
        FinalStateCheck(SPEC, teacher, None)(StatesBatch.of([states]))


@pytest.mark.parametrize(("num_rows", "is_judged"), [(4, True), (3, False)])
def test_four_rows_are_enough_to_tell_the_norm(num_rows: int, is_judged: bool) -> None:
    states = normed_states(TEACHER, num_rows)
    check = FinalStateCheck(SPEC, TEACHER, None)
    if is_judged:
        with pytest.raises(ContractError, match="after the final norm"):
            check(StatesBatch.of([states]))
    else:
        check(StatesBatch.of([states]))


def test_a_row_that_is_not_normed_clears_the_sample() -> None:
    states = normed_states(TEACHER, 9)
    last = states.last.clone()
    last[7] *= 3
    FinalStateCheck(SPEC, TEACHER, None)(StatesBatch.of([HiddenStates(states.sample, states.aux, last)]))
