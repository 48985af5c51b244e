"""The gradients of one step, added up over its micro-batches and over the ranks.

Both functions return the sums of each micro-batch.
"""

from collections.abc import Iterable
from itertools import chain, islice, repeat

import torch

from eyas.drafters.base import Objective
from eyas.drafters.common.batch import PackedBatch
from eyas.train.sharded_params import ShardedParams


def add_up_whole(
    objective: Objective, batches: Iterable[PackedBatch], num_batches: int
) -> list[torch.Tensor]:
    """Start the sums over all ranks once, with the last of the micro-batches: ``Ranks`` finishes them."""
    sums = []
    objective.start()
    for number, batch in enumerate(batches, start=1):
        if number == num_batches:
            objective.expect_last()
        sums.append(objective.backward(batch))
    objective.finish()
    return sums


def add_up_in_slices(
    objective: Objective, slices: ShardedParams, batches: Iterable[PackedBatch], num_rounds: int
) -> list[torch.Tensor]:
    """Add up each micro-batch's gradients over the ranks at once, so that none keeps them whole.

    In the last of the ``num_rounds``, which are those of the rank with most, some ranks have no batch.
    """
    sums = []
    slices.start()
    for batch in islice(chain(batches, repeat(None)), num_rounds):
        objective.start()
        objective.expect_last()
        if batch is not None:
            sums.append(objective.backward(batch))
        objective.finish()
        slices.settle()
    objective.start()  # nothing keeps whole gradients while the optimizer steps
    return sums
