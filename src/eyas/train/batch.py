"""Documents of a store side by side in one flat batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eyas.train.rows import RowPlan, plan_rows
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


def pack_batch(
    states: Sequence[HiddenStates], num_steps: int, device: torch.device, dtype: torch.dtype
) -> PackedBatch:
    """Lay documents one after another; positions restart with each of them."""
    samples = [s.sample for s in states]
    lengths = torch.tensor([len(s) for s in samples])
    documents = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    positions = torch.arange(int(lengths.sum())) - starts[documents]
    supervised = torch.from_numpy(np.concatenate([s.supervised for s in samples]))
    plan = plan_rows(supervised, documents, num_steps)
    return PackedBatch(
        sample_ids=tuple(s.sample_id for s in samples),
        tokens=torch.from_numpy(np.concatenate([s.input_ids for s in samples])).long().to(device),
        documents=documents.to(device),
        positions=positions.to(device),
        aux=torch.cat([s.aux for s in states]).to(device, dtype),
        last=torch.cat([s.last for s in states]).to(device, dtype),
        plan=RowPlan(
            plan.keys.to(device),
            *(
                tuple(t.to(device) for t in ts)
                for ts in (plan.rows, plan.keep, plan.key_places, plan.teacher)
            ),
        ),
    )
