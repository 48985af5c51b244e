"""Several samples looked at as one: where each begins, and whose a row is."""

import dataclasses

import numpy as np
import pytest
import torch

from eyas.capture.states_batch import StatesBatch, all_within, bounds_of, place_of
from eyas.engines.fake.engine import FakeEngine
from eyas.errors import ContractError
from eyas.row_stats import HIGH, LOW, NORM, TOTAL, measure_rows
from eyas.types import HiddenStates
from tiny import make_spec, random_samples

SPEC = make_spec()
SAMPLES = random_samples(4, SPEC.vocab_size)


def captured() -> list[HiddenStates]:
    return [i for i in FakeEngine(None, SPEC).capture(SAMPLES) if isinstance(i, HiddenStates)]


def measured(states: HiddenStates) -> HiddenStates:
    figures = (measure_rows(states.aux), measure_rows(states.last[:, None])[:, 0])
    return dataclasses.replace(states, figures=figures)


def test_bounds_say_where_each_part_begins_and_where_the_last_one_ends() -> None:
    bounds = bounds_of([torch.zeros(3), torch.zeros(1), torch.zeros(2)])
    assert bounds.tolist() == [0, 3, 4, 6]
    assert [place_of(row, bounds) for row in range(6)] == [0, 0, 0, 1, 2, 2]


def test_all_within_asks_each_part_by_itself() -> None:
    flags = np.array([True, True, False, True, True, True])
    assert all_within(flags, np.array([0, 2, 4, 6])).tolist() == [True, False, True]
    both = np.stack([flags, ~flags], 1)
    assert all_within(both, np.array([0, 2, 3, 6])).tolist() == [[True, False], [False, True], [True, False]]


def test_a_batch_holds_the_statistics_of_each_row_sample_by_sample() -> None:
    states = captured()
    batch = StatesBatch.of(states)
    assert batch.aux.shape == (sum(map(len, SAMPLES)), SPEC.num_aux_layers, 4)
    assert batch.aux_bounds.tolist() == np.cumsum([0, *map(len, SAMPLES)]).tolist()
    assert np.diff(batch.last_bounds).tolist() == [int(s.supervised.sum()) for s in SAMPLES]
    row, layer = 2, 1
    values = states[3].aux[row, layer]
    found = batch.aux[batch.aux_bounds[3] + row, layer]
    assert found[LOW] == float(values.min())
    assert found[HIGH] == float(values.max())
    assert found[TOTAL] == pytest.approx(float(values.sum()), rel=1e-4, abs=1e-4)
    assert found[NORM] == pytest.approx(float(values.norm()), rel=1e-5)


def test_some_samples_measured_by_the_engine_and_some_here_give_the_same() -> None:
    states = captured()
    mixed = [measured(s) if i % 2 else s for i, s in enumerate(states)]
    one, two = StatesBatch.of(states), StatesBatch.of(mixed)
    assert np.array_equal(one.aux, two.aux)
    assert np.array_equal(one.last, two.last)


def test_the_sample_that_changed_after_it_was_measured_is_named() -> None:
    states = [measured(s) for s in captured()]
    states[2] = dataclasses.replace(states[2], aux=states[2].aux * 1.01)
    with pytest.raises(ContractError, match="sample-2: these are not the states that the engine measured"):
        StatesBatch.of(states)
