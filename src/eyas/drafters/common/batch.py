"""Documents of a store one after another in one flat batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from eyas.types import HiddenStates


class BatchPlan(Protocol):
    """Which rows or anchors of a packed batch are trained; made on the CPU next to the batch.

    ``num_supervised`` is what summed losses are divided by, after adding up batches and ranks.
    """

    @property
    def num_supervised(self) -> int: ...
    def tensors(self) -> list[torch.Tensor]: ...
    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Return the plan with every tensor changed: moved, or pinned."""


Plan = TypeVar("Plan", bound=BatchPlan)
# Chooses what of a batch is trained, from supervised [N] bool and documents [N] ascending.
Planner = Callable[[torch.Tensor, torch.Tensor], Plan]


@dataclass(frozen=True)
class PackedBatch(Generic[Plan]):
    """Shapes: tokens, documents, positions [N]; aux [N, A, D]; last [R, D], the supervised positions'."""

    sample_ids: tuple[str, ...]
    tokens: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor
    plan: Plan

    @property
    def num_supervised(self) -> int:
        """What summed losses are divided by, once it is added up over batches and ranks."""
        return self.plan.num_supervised

    def to(self, device: torch.device) -> "PackedBatch[Plan]":
        """Return the batch on ``device``; from pinned memory the copy does not wait."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "PackedBatch[Plan]":
        return PackedBatch(
            self.sample_ids,
            change(self.tokens),
            change(self.documents),
            change(self.positions),
            change(self.aux),
            change(self.last),
            self.plan.each(change),
        )

    def tensors(self) -> list[torch.Tensor]:
        return [self.tokens, self.documents, self.positions, self.aux, self.last, *self.plan.tensors()]


def pack_batch(
    states: Sequence[HiddenStates], planner: Planner[Plan], device: torch.device, dtype: torch.dtype
) -> PackedBatch[Plan]:
    """Lay documents one after another; positions restart with each of them."""
    return lay_out(states, planner, dtype, pinned=False).to(device)


def lay_out(
    states: Sequence[HiddenStates], planner: Planner[Plan], dtype: torch.dtype, pinned: bool
) -> PackedBatch[Plan]:
    """Pack on the device of the states; ``pinned`` memory can be copied to a GPU while both keep working."""
    samples = [s.sample for s in states]
    lengths = torch.tensor([len(s) for s in samples])
    documents = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    positions = torch.arange(int(lengths.sum())) - starts[documents]
    supervised = torch.from_numpy(np.concatenate([s.supervised for s in samples]))
    plan = planner(supervised, documents)

    def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        shape = (sum(len(t) for t in tensors), *tensors[0].shape[1:])
        device = tensors[0].device
        out = torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned and device.type == "cpu")
        torch._foreach_copy_(list(out.split([len(t) for t in tensors])), list(tensors))
        return out

    batch = PackedBatch(
        sample_ids=tuple(s.sample_id for s in samples),
        tokens=torch.from_numpy(np.concatenate([s.input_ids for s in samples])).long(),
        documents=documents,
        positions=positions,
        aux=joined([s.aux for s in states]),
        last=joined([s.last for s in states]),
        plan=plan,
    )
    return batch.each(lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory()) if pinned else batch
