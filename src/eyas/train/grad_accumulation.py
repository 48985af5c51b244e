"""The gradients of one step, added up over its micro-batches and over the ranks.

``backward`` adds a micro-batch's gradients to the draft's, which are none at first, or to those of the fast
path's ``weights``, and returns its packed sums.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice, repeat

import torch

from eyas.drafters.common.batch import PackedBatch
from eyas.drafters.eagle3.fused.weights import Weights
from eyas.train.ranks import Ranks
from eyas.train.sharded_params import ShardedParams

Backward = Callable[[PackedBatch], torch.Tensor]


def add_up_whole(
    parameters: Sequence[torch.nn.Parameter],
    weights: Weights | None,
    ranks: Ranks,
    batches: Iterable[PackedBatch],
    num_batches: int,
    backward: Backward,
) -> list[torch.Tensor]:
    """Start the sums over all ranks once, after the last of the micro-batches: ``ranks`` finishes them."""
    sums = []
    if weights:
        weights.start()
    for number, batch in enumerate(batches, start=1):
        if weights and number == num_batches:
            weights.expect_last()
        sums.append(backward(batch))
    if weights:
        weights.finish()
    elif ranks.size > 1:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            ranks.start_adding_up(parameter.grad)
    return sums


def add_up_in_slices(
    slices: ShardedParams,
    weights: Weights | None,
    batches: Iterable[PackedBatch],
    num_rounds: int,
    backward: Backward,
) -> list[torch.Tensor]:
    """Add up each micro-batch's gradients over the ranks at once, so that none keeps them whole.

    In the last of the ``num_rounds``, which are those of the rank with most, some ranks have no batch.
    """
    sums = []
    slices.start()
    for batch in islice(chain(batches, repeat(None)), num_rounds):
        if weights:
            weights.start()
            weights.expect_last()
        if batch is not None:
            sums.append(backward(batch))
        if weights:
            weights.finish()
            slices.settle()
        else:
            slices.take()
    return sums
