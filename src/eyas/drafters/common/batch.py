"""Documents of a store side by side in one flat batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eyas.drafters.eagle3.ttt_rows import RowPlan, plan_rows
from eyas.types import HiddenStates


@dataclass(frozen=True)
class PackedBatch:
    """Shapes: tokens, documents, positions [N]; aux [N, A, D]; last [R, D], the supervised positions'."""

    sample_ids: tuple[str, ...]
    tokens: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor
    plan: RowPlan

    @property
    def num_supervised(self) -> int:
        """Rows that step 0 supervises; losses are divided by their global number."""
        return len(self.plan.rows[0])

    def to(self, device: torch.device) -> "PackedBatch":
        """Return the batch on ``device``; from pinned memory the copy does not wait."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "PackedBatch":
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
    states: Sequence[HiddenStates], num_steps: int, device: torch.device, dtype: torch.dtype
) -> PackedBatch:
    """Lay documents one after another; positions restart with each of them."""
    return lay_out(states, num_steps, dtype, pinned=False).to(device)


def lay_out(states: Sequence[HiddenStates], num_steps: int, dtype: torch.dtype, pinned: bool) -> PackedBatch:
    """Pack where the states lie; ``pinned`` memory can be copied to a GPU while both go on working."""
    samples = [s.sample for s in states]
    lengths = torch.tensor([len(s) for s in samples])
    documents = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    positions = torch.arange(int(lengths.sum())) - starts[documents]
    supervised = torch.from_numpy(np.concatenate([s.supervised for s in samples]))
    plan = plan_rows(supervised, documents, num_steps)

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
