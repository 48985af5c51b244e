"""Per-layer figures of captured states: what a reader looks at to see that a layer is what it should be."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_BLOCK = 1 << 20  # values summed up at a time: smaller ones take the interpreter's lock more often


@dataclass(frozen=True)
class LayerSums:
    """Least and largest value, sums, and number of values, each [L]; sums of samples add up."""

    low: torch.Tensor
    high: torch.Tensor
    total: torch.Tensor
    squares: torch.Tensor
    count: int

    def __add__(self, other: "LayerSums") -> "LayerSums":
        return LayerSums(
            torch.minimum(self.low, other.low),
            torch.maximum(self.high, other.high),
            self.total + other.total,
            self.squares + other.squares,
            self.count + other.count,
        )

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {k: getattr(self, k).tolist() for k in ("low", "high", "total", "squares")}
        return out | {"count": self.count}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "LayerSums":
        tensors = {
            k: torch.tensor(value[k], dtype=torch.float64) for k in ("low", "high", "total", "squares")
        }
        return cls(**tensors, count=value["count"])

    def table(self) -> list[dict[str, float]]:
        """Return min, max, mean and RMS of each layer."""
        columns = zip(
            self.low.tolist(), self.high.tolist(), self.total.tolist(), self.squares.tolist(), strict=True
        )
        return [
            {"min": low, "max": high, "mean": total / self.count, "rms": math.sqrt(squares / self.count)}
            for low, high, total, squares in columns
        ]


def summarise(states_TLD: torch.Tensor) -> tuple[LayerSums, torch.Tensor]:
    """Return the figures of each layer, and the norm of each row [T, L].

    NaN anywhere in a layer shows in ``low`` and ``high``, an infinity in one of them.
    """
    num_tokens, num_layers, width = states_TLD.shape
    low, high, total, norms = (torch.empty(num_tokens, num_layers) for _ in range(4))
    # Block by block in float32: half floats reduce twenty times slower, and a block stays in the cache. All
    # blocks in one place: memory that is new for each costs more than the sums.
    rows = max(1, _BLOCK // max(1, num_layers * width))
    space = torch.empty(min(rows, num_tokens), num_layers, width)
    for start in range(0, num_tokens, rows):
        here = slice(start, start + rows)
        states = states_TLD[here]
        block = space[: len(states)].copy_(states)
        torch.amin(block, -1, out=low[here])
        torch.amax(block, -1, out=high[here])
        torch.sum(block, -1, out=total[here])
        torch.linalg.vector_norm(block, dim=-1, out=norms[here])
    sums = LayerSums(
        low.amin(0).double() if num_tokens else low.new_full((num_layers,), math.inf).double(),
        high.amax(0).double() if num_tokens else high.new_full((num_layers,), -math.inf).double(),
        total.sum(0, dtype=torch.float64),
        norms.double().square().sum(0),
        num_tokens * width,
    )
    return sums, norms


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
