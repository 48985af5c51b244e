"""Several samples' states looked at as one: a check of many rows costs little more than one of a few."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from eyas.errors import ContractError
from eyas.row_stats import NORM, measure_rows
from eyas.types import HiddenStates, TokenizedSample

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Bounds = npt.NDArray[np.int64]

# Of many rows that an engine has measured every so many-th is measured again, up to rounding.
_AGAIN = 16
_ROUNDING = 1e-4


@dataclass(frozen=True)
class StatesBatch:
    """The states of S samples, and the figures of all their rows (``eyas.row_stats``), sample by sample.

    Shapes: aux [N, A, 4], last [R, 4]; sample i has rows aux_bounds[i] to aux_bounds[i + 1] of aux, and
    those of last_bounds likewise. All samples' states have the same layers and width.
    """

    states: Sequence[HiddenStates]
    aux: Floats
    last: Floats
    aux_bounds: Bounds
    last_bounds: Bounds

    @classmethod
    def of(cls, states: Sequence[HiddenStates]) -> "StatesBatch":
        """Take what engines measured, after measuring some of those rows again; measure the others here.

        Raises: ContractError for a sample whose states are not those that were measured.
        """
        given = [(s, *s.figures) for s in states if s.figures is not None]
        if given:
            measured, of_aux, of_last = zip(*given, strict=True)
            _compare(measured, [s.aux for s in measured], of_aux)
            _compare(measured, [s.last[:, None] for s in measured], [f[:, None] for f in of_last])
        aux = [measure_rows(s.aux) if s.figures is None else s.figures[0] for s in states]
        last = [measure_rows(s.last[:, None])[:, 0] if s.figures is None else s.figures[1] for s in states]
        return cls(states, torch.cat(aux).numpy(), torch.cat(last).numpy(), bounds_of(aux), bounds_of(last))

    @property
    def samples(self) -> list[TokenizedSample]:
        return [s.sample for s in self.states]


def bounds_of(parts: Sequence[torch.Tensor]) -> Bounds:
    """Return where each part begins when all are joined, and where the last one ends."""
    return np.cumsum([0, *map(len, parts)], dtype=np.int64)


def place_of(row: int, bounds: Bounds) -> int:
    """Return which part ``row`` of the joined ones is of."""
    return int(np.searchsorted(bounds, row, side="right")) - 1


def all_within(flags: Bools, bounds: Bounds) -> Bools:
    """Return, of flags [N, ...], whether all of a part's are true, [S, ...]; no part is empty."""
    whole: Bools = np.logical_and.reduceat(flags, bounds[:-1], axis=0)
    return whole


def _compare(
    states: Sequence[HiddenStates], parts: Sequence[torch.Tensor], figures: Sequence[torch.Tensor]
) -> None:
    """Measure some rows of each part [T, L, D] again and compare with its figures [T, L, 4]."""
    chosen = [_some(part) for part in parts]
    rows = torch.cat([rows for some in chosen for rows in some])
    again = measure_rows(rows).numpy()
    given = torch.cat([rows for part in figures for rows in _some(part)]).numpy()
    with np.errstate(invalid="ignore"):  # infinities are for another check to refuse
        # Least and largest values are exact; sums come from another order.
        rounding = _ROUNDING * again[..., NORM:] * [0, 0, math.sqrt(rows.shape[-1]), 1]
        close = np.abs(again - given) <= rounding
    same = (close | (again == given) | (np.isnan(again) & np.isnan(given))).all((1, 2))
    if not same.all():
        bounds = np.cumsum([0, *(sum(map(len, some)) for some in chosen)])
        sample = states[place_of(int(np.argmin(same)), bounds)].sample
        raise ContractError(
            f"sample {sample.sample_id}: these are not the states that the engine measured",
            hint="they were changed between its memory and here: run the same command again",
        )


def _some(rows: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows that are measured again: every so many-th and the last, of a few rows all."""
    return [rows] if len(rows) <= 4 * _AGAIN else [rows[::_AGAIN], rows[-1:]]
