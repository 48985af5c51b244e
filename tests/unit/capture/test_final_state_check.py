"""Last states predict the tokens that follow; those of another request, or of another layer, do not."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from eyas.capture.final_state_check import FinalStateCheck, count_misses
from eyas.capture.states_batch import StatesBatch
from eyas.errors import ContractError
from eyas.targets.teacher import TeacherHead
from eyas.types import HiddenStates, TokenizedSample
from tiny import make_spec

WIDTH = 64
SPEC = make_spec(hidden_size=WIDTH, vocab_size=WIDTH, aux_layer_ids=(2, 4), num_layers=8)
# A token's row of the head is a unit vector, and the norm changes no direction.
TEACHER = TeacherHead(
    norm_weight=torch.ones(WIDTH),
    head=torch.eye(WIDTH),
    embedding=torch.eye(WIDTH),
    norm_kind="rms",
    norm_eps=1e-6,
    logit_softcap=None,
    logit_scale=1.0,
)


def sample(number: int, length: int = 100) -> TokenizedSample:
    ids = np.random.default_rng(number).integers(0, WIDTH, length).astype(np.int32)
    return TokenizedSample(f"s{number}", ids, np.ones(length, dtype=bool), cut=True)


def answered(number: int, share: float = 1.0, scale: float = 3.0) -> HiddenStates:
    """Return states of which a ``share`` predict the next token, the others a random one."""
    one = sample(number)
    rng = np.random.default_rng(100 + number)
    right = rng.random(len(one)) < share
    tokens = np.where(right, np.roll(one.input_ids, -1), rng.integers(0, WIDTH, len(one)))
    noise = torch.randn(len(one), 3, WIDTH, generator=torch.Generator().manual_seed(number))
    last = noise[:, 2] * 0.1 + torch.eye(WIDTH)[torch.from_numpy(tokens)] * scale
    return HiddenStates.select(one, noise[:, :2], last)


def check(known: Sequence[HiddenStates]) -> FinalStateCheck:
    return FinalStateCheck.calibrated(SPEC, TEACHER, known)


def refused(found: FinalStateCheck, *states: HiddenStates) -> str:
    with pytest.raises(ContractError) as caught:
        found(StatesBatch.of(states))
    return caught.value.what


def test_greedy_answers_are_judged_against_all_tokens_of_the_answer() -> None:
    known = [answered(i) for i in range(4)]
    assert all(misses == 0 for misses, _ in count_misses(known, TEACHER, against_all=True))
    found = check(known)
    assert (found.against_all, found.usual_misses) == (True, 0.02)
    found(StatesBatch.of([answered(9), answered(10)]))


def test_states_of_another_request_or_shifted_by_a_row_are_refused_by_name() -> None:
    found = check([answered(i) for i in range(4)])
    others = dataclasses.replace(answered(5), last=answered(6).last)
    assert "sample s5: " in refused(found, answered(4), others)
    shifted = dataclasses.replace(answered(7), last=answered(7).last.roll(1, 0))
    assert "do not predict the tokens that follow" in refused(found, shifted)


def test_answers_by_others_are_judged_against_one_token_each() -> None:
    known = [answered(i, share=0.85) for i in range(8)]
    found = check(known)
    assert found.usual_misses is not None
    assert not found.against_all
    found(StatesBatch.of([answered(9, share=0.85)]))


def test_tokens_are_not_judged_where_the_target_predicts_too_few() -> None:
    found = check([answered(i, share=0.1) for i in range(4)])
    assert found.usual_misses is None
    found(StatesBatch.of([dataclasses.replace(answered(5), last=answered(6).last)]))
    assert check([]).usual_misses is None


def test_an_aux_layer_in_place_of_the_last_is_refused_whatever_it_predicts() -> None:
    one = answered(1)
    wrong = dataclasses.replace(one, last=one.aux[:, 1].contiguous())
    assert "the last states are those of layer 4" in refused(check([]), wrong)


def test_states_after_the_final_norm_are_refused() -> None:
    one = answered(1)
    wrong = dataclasses.replace(one, last=TEACHER.normed(one.last))
    assert "are after the final norm" in refused(check([]), answered(2), wrong)
