"""The block plan: at which tokens blocks start, and how many tokens of each block are supervised.

A block that starts at token a (its anchor) predicts tokens a+1, a+2, ...; the teacher of token a+1+j is
position a+j. Supervision of a block ends at the first position that is not supervised, and at the end
of the document. So a token is an anchor only if it and the token after it are the assistant's, which is
where serving starts a round.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class BlockPlan:
    """Blocks of a packed batch, ascending.

    Shapes: anchors [n], packed positions of the anchor tokens; teachers [n], the rows of ``last`` that
    judge the first prediction of each block (the next ones judge the next); depths [n], how many
    predictions are supervised, at least 1; startable [R], whether serving could start a round at the
    position of each row of ``last``; supervised [R], those positions; runs [R], how many supervised
    positions of the same document follow one another from each of them on.
    ``num_supervised`` is the sum of ``depths``, ``spans`` [n, 2] the teacher rows of each block as
    half-open ranges; both stay on the host.
    """

    anchors: torch.Tensor
    teachers: torch.Tensor
    depths: torch.Tensor
    supervised: torch.Tensor
    startable: torch.Tensor
    runs: torch.Tensor
    num_supervised: int
    spans: np.ndarray

    def tensors(self) -> list[torch.Tensor]:
        return [self.anchors, self.teachers, self.depths, self.supervised, self.startable, self.runs]

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "BlockPlan":
        """Return the plan with every tensor changed: moved, or pinned."""
        return BlockPlan(
            change(self.anchors),
            change(self.teachers),
            change(self.depths),
            change(self.supervised),
            change(self.startable),
            change(self.runs),
            self.num_supervised,
            self.spans,
        )

    def of_rounds(self, num_predictions: int) -> "BlockPlan":
        """Return the plan of a block at every position at which serving could start a round."""
        teachers = self.startable.nonzero().flatten()
        depths = self.runs[teachers].clamp(max=num_predictions)
        spans = _spans(teachers.cpu().numpy(), depths.cpu().numpy())
        return self._with(self.supervised[teachers], teachers, depths, spans)

    def part(self, chosen: slice) -> "BlockPlan":
        """Return the plan of some of its blocks, without a wait for the device."""
        tensors = self.anchors[chosen], self.teachers[chosen], self.depths[chosen]
        return self._with(*tensors, self.spans[chosen])

    def _with(
        self, anchors: torch.Tensor, teachers: torch.Tensor, depths: torch.Tensor, spans: np.ndarray
    ) -> "BlockPlan":
        return BlockPlan(
            anchors,
            teachers,
            depths,
            self.supervised,
            self.startable,
            self.runs,
            int((spans[:, 1] - spans[:, 0]).sum()),
            spans,
        )


def plan_blocks(
    supervised: torch.Tensor, documents: torch.Tensor, num_predictions: int, num_anchors: int, draw: int
) -> BlockPlan:
    """Draw ``num_anchors`` anchors of each document without replacement, all where there are fewer.

    Shapes: supervised [N] bool, documents [N] ascending. ``draw`` seeds the choice.
    """
    positions = supervised.numpy().nonzero()[0]
    of_document = documents.numpy()[positions]
    # Serving never starts a round at a document's first token: before it the target has read nothing.
    has_context = np.zeros(len(positions), dtype=bool)
    inside = positions > 0
    has_context[inside] = documents.numpy()[positions[inside] - 1] == of_document[inside]
    runs = run_lengths(positions, of_document)

    generator = np.random.default_rng(draw)
    chosen: list[np.ndarray] = []
    for document in np.unique(of_document):
        rows = np.flatnonzero((of_document == document) & has_context)
        if len(rows) > num_anchors:
            rows = np.sort(generator.choice(rows, num_anchors, replace=False))
        chosen.append(rows)
    teachers = np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)
    depths = np.minimum(runs[teachers], num_predictions)
    return BlockPlan(
        anchors=torch.from_numpy(positions[teachers]),
        teachers=torch.from_numpy(teachers),
        depths=torch.from_numpy(depths),
        supervised=torch.from_numpy(positions),
        startable=torch.from_numpy(has_context),
        runs=torch.from_numpy(runs),
        num_supervised=int(depths.sum()),
        spans=_spans(teachers, depths),
    )


def run_lengths(positions: np.ndarray, of_document: np.ndarray) -> np.ndarray:
    """Return how many positions of one document follow one another without a gap from each on, [R]."""
    runs = np.ones(len(positions), dtype=np.int64)
    if not len(positions):
        return runs
    follows = (np.diff(positions) == 1) & (of_document[1:] == of_document[:-1])
    ends = np.append(np.flatnonzero(~follows), len(positions) - 1)  # the last position of each run
    places = np.arange(len(positions))
    return ends[np.searchsorted(ends, places)] - places + 1


def num_blocks(supervised: np.ndarray, num_anchors: int) -> int:
    """Return how many blocks of a sample are trained; supervised [T] bool."""
    return min(num_anchors, int(supervised[1:].sum()))


def _spans(teachers: np.ndarray, depths: np.ndarray) -> np.ndarray:
    return np.stack([teachers, teachers + depths], axis=1)
