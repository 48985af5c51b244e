"""Each check of captured states, by states that only it refuses; samples next to them are not blamed."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from eyas.capture.capture_checks import check_states
from eyas.engines.fake.engine import FakeEngine
from eyas.errors import ContractError
from eyas.types import HiddenStates, TokenizedSample
from tiny import make_spec

SPEC = make_spec()
LENGTHS = (9, 6, 12)
Change = Callable[[torch.Tensor], None]  # in place


def sample(number: int, length: int) -> TokenizedSample:
    ids = (np.arange(length) * 7 + number) % 50
    mask = np.arange(length) >= 2
    return TokenizedSample(f"s{number}", ids.astype(np.int32), mask, cut=False)


SAMPLES = [sample(number, length) for number, length in enumerate(LENGTHS)]


def captured() -> list[HiddenStates]:
    return [s for s in FakeEngine(None, SPEC).capture(SAMPLES) if isinstance(s, HiddenStates)]


def nothing_outside(norms: Sequence[torch.Tensor]) -> None:
    assert [n.shape for n in norms] == [(length, SPEC.num_aux_layers) for length in LENGTHS]


def changed(number: int, aux: Change | None = None, last: Change | None = None) -> list[HiddenStates]:
    """Return the states of all samples, one of them with its tensors changed."""
    states = captured()
    new_aux, new_last = states[number].aux.clone(), states[number].last.clone()
    if aux:
        aux(new_aux)
    if last:
        last(new_last)
    states[number] = HiddenStates(states[number].sample, new_aux, new_last)
    return states


def refused(states: Sequence[HiddenStates]) -> str:
    with pytest.raises(ContractError) as caught:
        check_states(states, SAMPLES, SPEC, nothing_outside)
    return caught.value.what


def put(place: tuple[int, ...] | int, value: float) -> Change:
    def change(tensor: torch.Tensor) -> None:
        tensor[place] = value

    return change


def test_states_as_they_should_be_pass_with_the_sums_of_their_layers() -> None:
    states = captured()
    aux, last = check_states(states, SAMPLES, SPEC, nothing_outside)
    assert type(aux) is type(last)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_refused_by_the_name_of_its_sample(number: int, value: float) -> None:
    for place in ((0, 0, 0), (LENGTHS[number] - 1, 2, 15)):
        assert (
            refused(changed(number, aux=put(place, value))) == f"sample s{number}: aux states are not finite"
        )
    assert (
        refused(changed(number, last=put((-1, 3), value))) == f"sample s{number}: last states are not finite"
    )


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("layer", range(3))
def test_a_layer_that_is_all_zero_is_refused(number: int, layer: int) -> None:
    states = changed(number, aux=lambda aux: aux[:, layer].zero_())
    assert refused(states) == f"sample s{number}: aux layer number {layer} is all zero"


def test_last_states_that_are_all_zero_are_refused() -> None:
    states = changed(1, last=lambda last: last.zero_())
    assert refused(states) == "sample s1: last layer number 0 is all zero"


def test_a_layer_that_is_zero_in_all_rows_but_one_is_no_empty_layer() -> None:
    def nearly(aux: torch.Tensor) -> None:
        kept = aux[3, 1].clone()
        aux[:, 1] = 0
        aux[3, 1] = kept

    check_states(changed(0, aux=nearly), SAMPLES, SPEC, nothing_outside)


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 2), (1, 2)])
def test_a_layer_that_is_a_copy_of_another_is_refused(one: int, other: int) -> None:
    def copy(aux: torch.Tensor) -> None:
        aux[:, other] = aux[:, one]

    assert (
        refused(changed(2, aux=copy))
        == f"sample s2: aux layers number {one} and {other} hold the same states"
    )


def test_layers_of_equal_norms_that_are_not_copies_pass() -> None:
    def turn(aux: torch.Tensor) -> None:
        aux[:, 1] = -aux[:, 0]

    check_states(changed(0, aux=turn), SAMPLES, SPEC, nothing_outside)


def test_a_copy_in_all_rows_but_one_passes() -> None:
    def nearly(aux: torch.Tensor) -> None:
        aux[1:, 1] = aux[1:, 0]

    check_states(changed(0, aux=nearly), SAMPLES, SPEC, nothing_outside)


@pytest.mark.parametrize("row", [0, 4, 8])
def test_a_row_that_is_all_zero_is_refused_by_its_number(row: int) -> None:
    assert refused(changed(0, aux=put(row, 0.0))) == f"sample s0: row {row} is all zero"


def test_a_row_that_is_zero_in_one_layer_is_no_empty_row() -> None:
    check_states(changed(0, aux=put((4, 1), 0.0)), SAMPLES, SPEC, nothing_outside)


@pytest.mark.parametrize(("number", "row"), [(0, 0), (1, 4), (2, 10), (2, 5)])
def test_a_row_that_repeats_the_one_before_is_refused(number: int, row: int) -> None:
    def repeat(aux: torch.Tensor) -> None:
        aux[row + 1] = aux[row]

    assert refused(changed(number, aux=repeat)) == (
        f"sample s{number}: rows {row} and {row + 1} of different tokens are the same"
    )


def test_the_last_row_of_a_sample_may_equal_the_first_of_the_next() -> None:
    states = captured()
    aux = states[1].aux.clone()
    aux[0] = states[0].aux[-1]
    states[1] = HiddenStates(states[1].sample, aux, states[1].last)
    check_states(states, SAMPLES, SPEC, nothing_outside)


def test_rows_of_equal_tokens_may_be_equal() -> None:
    ids = np.array([5, 5, 5, 9, 4, 8, 7, 3, 2], dtype=np.int32)
    wanted = [dataclasses.replace(SAMPLES[0], input_ids=ids), *SAMPLES[1:]]
    states = captured()
    aux = states[0].aux.clone()
    aux[1] = aux[0]
    states[0] = HiddenStates(wanted[0], aux, states[0].last)
    check_states(states, wanted, SPEC, nothing_outside)


def test_rows_of_equal_norms_that_differ_pass() -> None:
    def turn(aux: torch.Tensor) -> None:
        aux[4] = -aux[3]

    check_states(changed(0, aux=turn), SAMPLES, SPEC, nothing_outside)


def test_states_of_other_tokens_are_refused() -> None:
    states = captured()
    ids = states[1].sample.input_ids.copy()
    ids[-1] += 1
    other = dataclasses.replace(states[1].sample, input_ids=ids)
    states[1] = HiddenStates(other, states[1].aux, states[1].last)
    assert refused(states) == "sample s1: the engine echoed other token ids than it was sent"


def test_an_equal_sample_in_another_object_passes() -> None:
    states = captured()
    states[1] = HiddenStates(dataclasses.replace(states[1].sample), states[1].aux, states[1].last)
    check_states(states, SAMPLES, SPEC, nothing_outside)


def test_fewer_layers_than_the_targets_are_refused() -> None:
    states = captured()
    states[2] = HiddenStates(states[2].sample, states[2].aux[:, :2], states[2].last)
    assert "sample s2: 2 aux layers of width 16" in refused(states)


def test_a_magnitude_that_the_probe_never_saw_is_refused_by_sample_and_layer() -> None:
    with pytest.raises(ContractError, match="sample s2: aux layer number 1 has another magnitude"):
        check_states(captured(), SAMPLES, SPEC, lambda norms: (2, 1))


def test_last_states_are_given_to_the_check_of_last_states() -> None:
    seen = []
    check_states(captured(), SAMPLES, SPEC, nothing_outside, seen.append)  # type: ignore[arg-type]
    (bundle,) = seen
    supervised = [int(s.supervised.sum()) for s in SAMPLES]
    assert bundle.last_bounds.tolist() == np.cumsum([0, *supervised]).tolist()
