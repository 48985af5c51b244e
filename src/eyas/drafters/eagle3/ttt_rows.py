"""The row plan: which draft rows run at which unroll step, and which teacher each is held to.

Row i reads token i+1 at step 0 and token i+1+k at step k, where it is held to the teacher of
position i+1+k. It runs at step k exactly when serving could get there: when positions
i+1 .. i+1+k of its document are all supervised. Rows of a later step are therefore a subset of the
rows of an earlier one, and a row that no step supervises only lends its step-0 key and value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch


@dataclass(frozen=True)
class RowPlan:
    """Indices into the N packed tokens.

    keys [M]: rows whose step-0 keys exist (every token but a document's last).
    rows[k] [R_k]: rows that run at step k. keep[k] [R_k]: their places among rows[k-1] (k >= 1).
    key_places[k] [R_k]: their places among ``keys``. teacher[k] [R_k]: their teachers' places among
    the supervised positions, in packed order.
    """

    keys: torch.Tensor
    rows: tuple[torch.Tensor, ...]
    keep: tuple[torch.Tensor, ...]
    key_places: tuple[torch.Tensor, ...]
    teacher: tuple[torch.Tensor, ...]

    @property
    def num_steps(self) -> int:
        return len(self.rows)

    @property
    def num_supervised(self) -> int:
        """Rows that step 0 supervises; losses are divided by their number in all batches and ranks."""
        return len(self.rows[0])

    def tensors(self) -> list[torch.Tensor]:
        return [self.keys, *self.rows, *self.keep, *self.key_places, *self.teacher]

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "RowPlan":
        """Return the plan with every tensor changed: moved, or pinned."""
        return RowPlan(
            change(self.keys),
            *(
                tuple(change(t) for t in tensors)
                for tensors in (self.rows, self.keep, self.key_places, self.teacher)
            ),
        )


def rows_of(num_steps: int) -> Callable[[torch.Tensor, torch.Tensor], RowPlan]:
    """Return what plans an unroll of ``num_steps`` steps for a batch."""
    return partial(plan_rows, num_steps=num_steps)


def plan_rows(supervised: torch.Tensor, documents: torch.Tensor, num_steps: int) -> RowPlan:
    """Plan the unroll of ``num_steps`` steps.

    Shapes: supervised [N] bool, documents [N] ascending ids.
    """
    same = documents[1:] == documents[:-1]  # token i and i+1 belong to one document
    keys = same.nonzero().flatten()
    place_of_row = torch.cumsum(torch.cat([same, same.new_zeros(1)]), 0) - 1
    place_of_teacher = torch.cumsum(supervised, 0) - 1

    # alive[i]: row i runs at the current step. The teacher position moves one token on each step.
    num_tokens = len(supervised)
    alive = torch.cat([same & supervised[1:], same.new_zeros(1)])
    rows, keep = [alive.nonzero().flatten()], [torch.empty(0, dtype=torch.long)]
    for k in range(1, num_steps):
        previous = rows[-1]
        position = previous + 1 + k
        inside = position < num_tokens
        position = position.clamp(max=num_tokens - 1)
        going = inside & supervised[position] & (documents[position] == documents[previous])
        keep.append(going.nonzero().flatten())
        rows.append(previous[keep[-1]])
    return RowPlan(
        keys=keys,
        rows=tuple(rows),
        keep=tuple(keep),
        key_places=tuple(place_of_row[r] for r in rows),
        teacher=tuple(place_of_teacher[r + 1 + k] for k, r in enumerate(rows)),
    )
