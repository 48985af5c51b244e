"""What stored states look like, layer by layer: figures, histogram and repeated rows, from the shards."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from eyas.store.shards import ShardStore

# A histogram's bins are powers of two: one for zero, then by size, each with its sign.
_SMALLEST, _LARGEST = -12, 15
EDGES = tuple(2.0**e for e in range(_SMALLEST, _LARGEST + 1))


@dataclass
class LayerFigures:
    """Sums over values and rows of one layer; ``counts`` [2, bins]: negative and positive values by size."""

    low: float
    high: float
    total: float
    squares: float
    num_values: int
    num_zeros: int
    num_rows: int
    num_repeated: int
    counts: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, samples: torch.Tensor) -> "LayerFigures":
        """Look at the rows [N, D] of one layer; ``samples`` [N] says whose each is.

        A row is repeated when the row before it, of the same sample, holds the same values.
        """
        values = rows.float()
        flat = values.flatten()
        bins = torch.bucketize(flat.abs(), torch.tensor(EDGES), right=True)
        signs = (flat > 0).long()
        counts = torch.bincount(signs * (len(EDGES) + 1) + bins, minlength=2 * (len(EDGES) + 1))
        same = (values[1:] == values[:-1]).all(1) & (samples[1:] == samples[:-1])
        return cls(
            float(flat.min()),
            float(flat.max()),
            float(flat.sum(dtype=torch.float64)),
            float(values.norm(dim=1).double().square().sum()),
            len(flat),
            int((flat == 0).sum()),
            len(rows),
            int(same.sum()),
            counts.view(2, -1),
        )

    def __add__(self, other: "LayerFigures") -> "LayerFigures":
        return LayerFigures(
            min(self.low, other.low),
            max(self.high, other.high),
            self.total + other.total,
            self.squares + other.squares,
            self.num_values + other.num_values,
            self.num_zeros + other.num_zeros,
            self.num_rows + other.num_rows,
            self.num_repeated + other.num_repeated,
            self.counts + other.counts,
        )

    @property
    def mean(self) -> float:
        return self.total / self.num_values

    @property
    def rms(self) -> float:
        return (self.squares / self.num_values) ** 0.5

    def histogram(self) -> list[tuple[str, float]]:
        """Return the share of values in each range, from the most negative to the largest."""
        negative, positive = (self.counts.double() / self.num_values).tolist()
        names = [f"{edge:g}" for edge in EDGES]
        bars = [(f"below -{n}", share) for n, share in zip(names, negative[1:], strict=True)][::-1]
        bars.append((f"within ±{names[0]}", negative[0] + positive[0]))
        bars += [(f"above {n}", share) for n, share in zip(names, positive[1:], strict=True)]
        used = [i for i, (_, share) in enumerate(bars) if share]
        return bars[used[0] : used[-1] + 1]


def figures_of(store: ShardStore, num_threads: int) -> list[LayerFigures]:
    """Read every shard once, in parallel; return aux layers in order, then the last layer."""
    total: list[LayerFigures] = []
    with ThreadPoolExecutor(num_threads, "eyas-figures") as pool:
        for future in as_completed([pool.submit(_of_shard, store, s) for s in store.records]):
            part = future.result()
            total = [a + b for a, b in zip(total, part, strict=True)] if total and part else total or part
    return total


def verify_all(store: ShardStore, num_threads: int) -> Iterator[tuple[int, int | Exception]]:
    """Read and check every shard, in parallel; yield its number with its bytes or what is wrong with it."""
    with ThreadPoolExecutor(num_threads, "eyas-verify") as pool:
        shards = {pool.submit(store.verify, s): s for s in store.records}
        for future in as_completed(shards):
            yield shards[future], future.exception() or future.result()  # type: ignore[misc]


def _of_shard(store: ShardStore, shard: int) -> list[LayerFigures]:
    """Add up sample by sample: a shard is larger than what should be in memory several times over."""
    total: list[LayerFigures] = []
    for states in store.shard(shard):
        here = torch.zeros(len(states.sample), dtype=torch.long)
        part = [LayerFigures.of(states.aux[:, i], here) for i in range(states.aux.shape[1])]
        # Supervised rows next to each other in the file may be far apart in the sample.
        places = torch.from_numpy(states.sample.supervised).nonzero().flatten()
        part.append(LayerFigures.of(states.last, places - torch.arange(len(places))))
        total = [a + b for a, b in zip(total, part, strict=True)] if total else part
    return total
