"""Where each step's rows lie in the fused buffers, and what attention and the embedding need of them."""

from dataclasses import dataclass
from itertools import accumulate

import torch

from eyas.drafters.common.batch import PackedBatch
from eyas.drafters.eagle3.ttt_rows import RowPlan


@dataclass
class Steps:
    """Where each step's rows lie in buffers that hold all steps, and what attention needs to know.

    rows[k]: slice of step k. own[k]: slice of step k in the buffer of own keys (steps >= 1 only).
    own_index[k] [R_k, k]: each row's entries there. first[k], place[k] [R_k]: the range of step-0 keys
    that each row sees, ascending both; a window moves ``first``. read[k]: the token each row reads.
    """

    rows: list[slice]
    own: list[slice]
    own_index: list[torch.Tensor]
    first: list[torch.Tensor]
    place: list[torch.Tensor]
    read: list[torch.Tensor]

    @classmethod
    def of(cls, batch: PackedBatch[RowPlan], window: int | None) -> "Steps":
        plan = batch.plan
        counts = [len(r) for r in plan.rows if len(r)]  # later steps of short answers have no rows
        ends = list(accumulate(counts))
        key_documents = batch.documents[plan.keys]
        device = batch.tokens.device
        steps = cls([], [], [], [], [], [])
        index = torch.empty(counts[0] if counts else 0, 0, dtype=torch.int32, device=device)
        for k, (end, count) in enumerate(zip(ends, counts, strict=True)):
            steps.rows.append(slice(end - count, end))
            start = end - count - counts[0]
            steps.own.append(slice(start, start + count) if k else slice(0, 0))
            if k:
                entries = torch.arange(start, start + count, dtype=torch.int32, device=device)
                index = torch.cat([index[plan.keep[k]], entries[:, None]], dim=1)
            steps.own_index.append(index)
            rows = plan.rows[k]
            place = plan.key_places[k].int()
            first = torch.searchsorted(key_documents, batch.documents[rows]).int()
            # The query is k positions after its row. A window holds all steps, or the plain path is taken.
            steps.first.append(first if window is None else torch.maximum(first, place + (k + 1 - window)))
            steps.place.append(place)
            steps.read.append(batch.tokens[rows + 1 + k])
        return steps

    @property
    def num_rows(self) -> int:
        return self.rows[-1].stop if self.rows else 0

    @property
    def num_own(self) -> int:
        return self.own[-1].stop if self.own else 0
