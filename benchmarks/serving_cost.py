"""A model of what serving with a draft costs: a verify step of the target, and draft steps.

    round = step + token * n + ridge * max(0, n - n0) + context * c
            + K * (draft_step + draft_token * B) + round_extra

with B requests in a batch, n = B * (K + 1) tokens verified together, c tokens of context read for them, and
n0 the batch from which arithmetic, no longer the reading of weights, sets the pace. K = 0 is the target alone
(without round_extra). Every coefficient is a time in ms and at least zero; they are fitted to measured rounds
by relative least squares.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_NO_RIDGE = 1 << 30
_RIDGES = (_NO_RIDGE, 16, 32, 48, 64, 96, 128, 160, 192, 256)
_NAMES = ("step", "token", "ridge", "context", "draft_step", "draft_token", "round_extra")


@dataclass(frozen=True)
class Point:
    """One measured point: ``round_ms`` is the time of a target forward with what the draft adds to it."""

    concurrency: int  # B
    num_draft_tokens: int  # K
    context_tokens: float  # of one request, the mean over the measurement
    round_ms: float


@dataclass(frozen=True)
class CostModel:
    coefficients: dict[str, float]
    ridge_tokens: int

    def round_ms(self, point: Point) -> float:
        return float(_row(point, self.ridge_tokens) @ np.array([self.coefficients[n] for n in _NAMES]))

    def error(self, point: Point) -> float:
        """Return the prediction's error relative to what was measured."""
        return self.round_ms(point) / point.round_ms - 1


def fit(points: Sequence[Point]) -> CostModel:
    """Return the model with the least relative squared error, over all places of the ridge."""
    several = len({p.num_draft_tokens for p in points if p.num_draft_tokens}) > 1
    used = [i for i, name in enumerate(_NAMES) if several or name != "round_extra"]
    measured = np.array([p.round_ms for p in points])
    best: tuple[float, CostModel] | None = None
    for ridge_tokens in _RIDGES:
        rows = np.stack([_row(p, ridge_tokens) for p in points]) / measured[:, None]
        solution = _solve(rows, used)
        loss = float(((rows @ solution - 1) ** 2).sum())
        if best is None or loss < best[0] - 1e-12:
            best = loss, CostModel(dict(zip(_NAMES, solution.tolist(), strict=True)), ridge_tokens)
    assert best is not None
    return best[1]


def left_out_errors(points: Sequence[Point]) -> list[float]:
    """Return each point's error as predicted by a model that has not seen it.

    Not of the largest concurrency: nothing else may lie beyond the ridge.
    """
    largest = max(p.concurrency for p in points)
    inner = [i for i, p in enumerate(points) if p.concurrency < largest]
    return [fit([*points[:i], *points[i + 1 :]]).error(points[i]) for i in inner]


def _row(point: Point, ridge_tokens: int) -> np.ndarray:
    batch, k = point.concurrency, point.num_draft_tokens
    tokens = batch * (k + 1)
    return np.array(
        [1, tokens, max(0, tokens - ridge_tokens), batch * point.context_tokens, k, k * batch, k > 0],
        dtype=float,
    )


def _solve(rows: np.ndarray, used: Sequence[int]) -> np.ndarray:
    """Least squares to ones with no negative coefficient: the most negative is dropped until none is."""
    used = list(used)
    while True:
        scale = np.maximum(np.abs(rows[:, used]).max(axis=0), 1e-12)
        found = np.linalg.lstsq(rows[:, used] / scale, np.ones(len(rows)), rcond=None)[0] / scale
        if (found >= 0).all() or len(used) == 1:
            out = np.zeros(rows.shape[1])
            out[used] = np.maximum(found, 0)
            return out
        del used[int((found * scale).argmin())]
