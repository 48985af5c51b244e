"""Which samples make which step, for any number of ranks the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from eyas.config.schema import TrainSettings
from eyas.data.pack import pack
from eyas.errors import UserError
from eyas.store.base import StateReader
from eyas.train.ranks import shares_of

# Steps whose batches are exchanged until the batches of one step cost the same.
_WINDOW_STEPS = 32


@dataclass(frozen=True)
class MicroBatch(Sequence[int]):
    """The samples of one batch, by index.

    ``draw`` is a number that no other batch of the run has. What a kind of draft chooses by chance follows
    from
    it, and so is the same after an interruption and for any number of ranks.
    """

    samples: tuple[int, ...]
    draw: int

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        return self.samples[index]


Step = list[MicroBatch]


@dataclass(frozen=True)
class StepPlan:
    """Every optimizer step of a run.

    ``steps`` are the same for any number of ranks, and so is what comes out, to rounding; ``shares[i][rank]``
    are those batches of step i that a rank computes.
    """

    steps: list[Step]
    shares: list[list[Step]]

    @classmethod
    def of(
        cls,
        states: StateReader,
        cost_of: Callable[[np.ndarray], float],
        settings: TrainSettings,
        seed: int,
        num_ranks: int,
    ) -> "StepPlan":
        """Plan the run over ``states``; ``cost_of`` tells about how much work a sample is.

        Raises: UserError when a step has not as many micro-batches for every rank.
        """
        check_ranks(settings, num_ranks)
        costs = np.array([cost_of(states.sample(i).supervised) for i in range(len(states.lengths))])
        steps = plan_steps(states.lengths, costs, settings, seed)
        shares = [shares_of(step, [float(costs[list(b)].sum()) for b in step], num_ranks) for step in steps]
        return cls(steps, shares)


def plan_steps(lengths: Sequence[int], costs: np.ndarray, settings: TrainSettings, seed: int) -> list[Step]:
    """Return every step of the run."""
    steps = [
        step
        for epoch in range(settings.num_epochs)
        for step in _steps_of_epoch(
            pack(lengths, settings.batch_tokens, seed + epoch), costs, settings.batches_per_step, seed + epoch
        )
    ]
    numbers = count()
    return [[MicroBatch(tuple(group), draw_of(seed, next(numbers))) for group in step] for step in steps]


def draw_of(seed: int, number: int) -> int:
    """Return the draw of a run's batch; it fits in the seed of any generator."""
    return (seed << 32 | number) & (2**63 - 1)


def check_ranks(settings: TrainSettings, num_ranks: int) -> None:
    """Raises: UserError when a step has not as many micro-batches for every rank."""
    if settings.batches_per_step % num_ranks:
        fitting = -(-settings.batches_per_step // num_ranks) * num_ranks
        raise UserError(
            f"{num_ranks} GPUs cannot share train.batches_per_step={settings.batches_per_step} equally",
            hint=f"set train.batches_per_step={fitting}: a step is then {fitting} batches of "
            f"train.batch_tokens={settings.batch_tokens}, whatever the number of GPUs",
        )


def _steps_of_epoch(
    packs: list[list[int]], costs: np.ndarray, batches_per_step: int, seed: int
) -> list[list[list[int]]]:
    """Cut packs into steps; within a window of steps, packs of like cost go together.

    Ranks wait for the slowest of them, so the batches of one step should cost the same; which of the
    window's steps comes first stays random.
    """
    if batches_per_step == 1:
        return [[p] for p in packs]
    generator = np.random.default_rng(seed)
    steps: list[list[list[int]]] = []
    window = _WINDOW_STEPS * batches_per_step
    for start in range(0, len(packs), window):
        near = sorted(packs[start : start + window], key=lambda p: -costs[p].sum())
        cut = [near[i : i + batches_per_step] for i in range(0, len(near), batches_per_step)]
        steps += [cut[i] for i in generator.permutation(len(cut))]
    return steps
