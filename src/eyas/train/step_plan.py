"""Which samples make which step, for any number of ranks the same."""

from collections.abc import Sequence

import numpy as np

from eyas.config.schema import TrainSettings
from eyas.data.pack import pack
from eyas.errors import UserError
from eyas.store.base import StateReader

# What a token costs whose row no step supervises, of what a supervised row costs: it runs fc and the step-0
# keys and values only. From the matrix products of an 8B shape at K = 7; all that is asked of it is a guess
# that orders batches.
_UNSUPERVISED_SHARE = 0.02
# Steps whose batches are exchanged until the batches of one step cost the same.
_WINDOW_STEPS = 32


def costs_of(states: StateReader) -> np.ndarray:
    """Return about how much work each sample is, in supervised rows."""
    samples = (states.sample(i) for i in range(len(states.lengths)))
    return np.array([s.supervised.sum() + _UNSUPERVISED_SHARE * len(s) for s in samples])


def plan_steps(
    lengths: Sequence[int], costs: np.ndarray, settings: TrainSettings, seed: int
) -> list[list[list[int]]]:
    """Return every step of the run: its micro-batches, each a list of sample indices."""
    return [
        step
        for epoch in range(settings.num_epochs)
        for step in _steps_of_epoch(
            pack(lengths, settings.batch_tokens, seed + epoch), costs, settings.batches_per_step, seed + epoch
        )
    ]


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
