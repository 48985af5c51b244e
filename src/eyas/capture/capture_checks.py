"""What is refused of the states that an engine returns, each sample's by itself though many at a time."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from eyas.capture.final_state_check import FinalStateCheck
from eyas.capture.states_batch import StatesBatch, all_within, place_of
from eyas.capture.statistics import LayerSums
from eyas.errors import ContractError
from eyas.row_stats import HIGH, LOW, NORM
from eyas.store.shards import check_shape
from eyas.types import HiddenStates, TargetSpec, TokenizedSample

Checked = tuple[LayerSums, LayerSums]  # aux, last


def check_states(
    states: Sequence[HiddenStates],
    wanted: Sequence[TokenizedSample],
    spec: TargetSpec,
    outside: Callable[[Sequence[torch.Tensor]], tuple[int, int] | None],
    last_check: FinalStateCheck | None = None,
) -> Checked:
    """Refuse states that cannot be those of the samples ``wanted``, and return the figures of all.

    ``outside`` names, given each sample's row norms, the first sample and layer of a magnitude that the
    probe never saw.
    Raises: ContractError for other tokens than those sent, layers missing, values that are not finite, a
    layer that is all zero, a copy of another one or far from the probe's magnitude, a row that is zero or
    repeated, and last states that ``last_check`` refuses.
    """
    for one, sample in zip(states, wanted, strict=True):
        if one.sample is not sample and not np.array_equal(one.sample.input_ids, sample.input_ids):
            raise ContractError(
                f"sample {sample.sample_id}: the engine echoed other token ids than it was sent"
            )
        check_shape(one, spec)
    batch = StatesBatch.of(states)
    _check_values(batch)
    _check_layers(batch)
    _check_rows(batch)
    if last_check is not None:
        last_check(batch)
    norms = torch.from_numpy(batch.aux[..., NORM])
    found = outside(norms.split(np.diff(batch.aux_bounds).tolist()))
    if found is not None:
        place, layer = found
        raise ContractError(
            f"sample {wanted[place].sample_id}: aux layer number {layer} has another magnitude than any "
            "probe sample"
        )
    width = spec.hidden_size
    return LayerSums.of(batch.aux, width), LayerSums.of(batch.last[:, None], width)


def _check_values(batch: StatesBatch) -> None:
    """Refuse values that are not finite, and layers that were never filled."""
    for name, rows, bounds in (
        ("aux", batch.aux, batch.aux_bounds),
        ("last", batch.last[:, None], batch.last_bounds),
    ):
        low, high = rows[..., LOW], rows[..., HIGH]
        finite = (np.isfinite(low) & np.isfinite(high)).all(1)
        if not finite.all():
            sample = batch.samples[place_of(int(np.argmin(finite)), bounds)]
            raise ContractError(f"sample {sample.sample_id}: {name} states are not finite")
        empty = all_within((low == 0) & (high == 0), bounds)
        if empty.any():
            place, layer = np.argwhere(empty)[0]
            raise ContractError(
                f"sample {batch.samples[place].sample_id}: {name} layer number {layer} is all zero"
            )


def _check_layers(batch: StatesBatch) -> None:
    """Refuse a layer that is a copy of another."""
    norms = batch.aux[..., NORM]
    for a in range(norms.shape[1]):
        for b in range(a):
            # Equal norms are no proof, and one row of them is none of anything.
            for place in np.flatnonzero(all_within(norms[:, a] == norms[:, b], batch.aux_bounds)):
                aux = batch.states[place].aux
                if len(aux) > 1 and torch.equal(aux[:, a], aux[:, b]):
                    raise ContractError(
                        f"sample {batch.samples[place].sample_id}: aux layers number {b} and {a} hold the "
                        "same states"
                    )


def _check_rows(batch: StatesBatch) -> None:
    """Refuse rows that were never filled, and rows of another token."""
    norms, bounds = batch.aux[..., NORM], batch.aux_bounds
    empty = (norms == 0).all(1)
    if empty.any():
        row = int(np.argmax(empty))
        place = place_of(row, bounds)
        raise ContractError(f"sample {batch.samples[place].sample_id}: row {row - bounds[place]} is all zero")
    # Equal tokens may well have equal states, where nothing but they came before.
    ids = np.concatenate([s.input_ids for s in batch.samples])
    same = (norms[1:] == norms[:-1]).all(1) & (ids[1:] != ids[:-1])
    for first in np.flatnonzero(same).tolist():
        place = place_of(first, bounds)
        row, states = int(first - bounds[place]), batch.states[place]
        if row + 1 < len(states.aux) and torch.equal(states.aux[row], states.aux[row + 1]):
            raise ContractError(
                f"sample {states.sample.sample_id}: rows {row} and {row + 1} of different tokens are the "
                "same",
                hint="the engine repeated a row, or returned rows of another batch",
            )
