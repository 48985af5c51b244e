"""Per-layer figures of captured states: what a reader looks at to see that a layer is what it should be."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.row_stats import HIGH, LOW, NORM, TOTAL

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LayerSums:
    """Least and largest value, sums, and number of values, each [L]; sums of samples add up."""

    low: Floats
    high: Floats
    total: Floats
    squares: Floats
    count: int

    @classmethod
    def of(cls, rows_TLF: npt.NDArray[np.float32], width: int) -> "LayerSums":
        """Sum up what ``measure_rows`` found in rows of ``width`` values."""
        figures = rows_TLF.astype(np.float64)
        return cls(
            figures[..., LOW].min(0, initial=math.inf),
            figures[..., HIGH].max(0, initial=-math.inf),
            figures[..., TOTAL].sum(0),
            np.square(figures[..., NORM]).sum(0),
            len(rows_TLF) * width,
        )

    def __add__(self, other: "LayerSums") -> "LayerSums":
        return LayerSums(
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
            self.total + other.total,
            self.squares + other.squares,
            self.count + other.count,
        )

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {k: getattr(self, k).tolist() for k in ("low", "high", "total", "squares")}
        return out | {"count": self.count}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "LayerSums":
        arrays = {k: np.array(value[k], dtype=np.float64) for k in ("low", "high", "total", "squares")}
        return cls(**arrays, count=value["count"])

    def table(self) -> list[dict[str, float]]:
        """Return min, max, mean and RMS of each layer."""
        columns = zip(
            self.low.tolist(), self.high.tolist(), self.total.tolist(), self.squares.tolist(), strict=True
        )
        return [
            {"min": low, "max": high, "mean": total / self.count, "rms": math.sqrt(squares / self.count)}
            for low, high, total, squares in columns
        ]


def figures_of(aux: LayerSums, last: LayerSums) -> dict[str, Any]:
    """Return one shard's figures as its journal line holds them."""
    return {"aux": aux.to_json(), "last": last.to_json()}


def table_of(figures: Iterable[Mapping[str, Any] | None]) -> list[dict[str, float]]:
    """Return the figures over all shards of a store: aux layers in order, then the last layer."""
    known = [f for f in figures if f is not None]
    aux, last = (
        [LayerSums.from_json(f[name]) for f in known if f[name]["count"]] for name in ("aux", "last")
    )
    return [row for parts in (aux, last) if parts for row in sum(parts[1:], parts[0]).table()]
