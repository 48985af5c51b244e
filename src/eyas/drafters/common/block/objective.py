"""The objective of block drafts over packed batches: sums of losses, agreement, and rounds of serving.

Logits over the vocabulary exist for some blocks at a time, never for all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint

from eyas.drafters.base import Rounds
from eyas.drafters.common.batch import PackedBatch
from eyas.drafters.common.block.anchors import BlockPlan
from eyas.drafters.common.block.attention import BlockPlaces, PlainBlockAttention
from eyas.drafters.common.block.config import BlockConfig
from eyas.drafters.common.block.judge import BlockJudge, first_disagreement
from eyas.drafters.common.block.loss import BlockLosses, BlockTargets, LossMix, block_losses
from eyas.drafters.common.block.model import BlockAttend, KeysValues
from eyas.drafters.common.objective import AutogradObjective

# Rows of logits alive at a time, and blocks that pass the layers together when rounds are measured.
CHUNK_ROWS = 1024
_CHUNK_BLOCKS = 512

Batch = PackedBatch[BlockPlan]
MakeAttend = Callable[[BlockConfig, BlockPlaces], BlockAttend]


class FurtherLoss(Protocol):
    """What a kind is held to besides its logits. It needs the teacher's distribution."""

    @property
    def num_sums(self) -> int: ...

    def __call__(
        self,
        draft: Any,
        normed: torch.Tensor,
        previous: torch.Tensor,
        losses: BlockLosses,
        is_judged: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the differentiable loss of blocks, and their sums [num_sums]."""

    def ratios(self, sums: Sequence[float]) -> dict[str, float]:
        """Turn the sums of all blocks into what is logged."""


@dataclass(frozen=True)
class Chunk:
    """Some blocks of a batch. Shapes: normed [c, K, D]; previous [c, K], the true token before each one that
    is predicted; ``plan`` is that of these blocks, ``last`` [R, D] the batch's."""

    normed: torch.Tensor
    previous: torch.Tensor
    plan: BlockPlan
    last: torch.Tensor


class BlockObjective(AutogradObjective):
    """The plain path: autograd through everything, logits computed again in the backward pass."""

    def __init__(
        self,
        draft: Any,
        judge: BlockJudge,
        mix: LossMix,
        dtype: torch.dtype,
        device: torch.device,
        further: FurtherLoss | None = None,
        make_attend: MakeAttend = PlainBlockAttention,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        super().__init__(draft, (), dtype, device)
        self.draft, self.judge, self.mix, self.further = draft, judge, mix, further
        self.make_attend = make_attend
        self.num_predictions: int = draft.config.num_predictions
        self.chunk_blocks = max(1, chunk_rows // self.num_predictions)

    @property
    def num_sums(self) -> int:
        return 2 + 3 * self.num_predictions + (self.further.num_sums if self.further else 0)

    @property
    def needs_distribution(self) -> bool:
        return self.mix.needs_distribution or self.further is not None

    def backward(self, batch: Batch) -> torch.Tensor:
        """Add the gradients of the batch's summed loss; return its sums, fp64 [num_sums]."""
        with self.autocast():
            loss, sums = self.run(batch, batch.plan)
        if loss.requires_grad:
            loss.backward()
        return sums

    @torch.no_grad()
    def measure(self, batch: Batch, num_draft_tokens: int) -> tuple[torch.Tensor, Rounds]:
        """Return the sums of the planned blocks, and what a round at every position would accept."""
        with self.autocast():
            _, sums = self.run(batch, batch.plan)
        return sums, self.rounds(batch, num_draft_tokens)

    @torch.no_grad()
    def rounds(self, batch: Batch, num_draft_tokens: int) -> Rounds:
        """Say what a round at every position at which serving could start one would accept."""
        plan = batch.plan.of_rounds(self.num_predictions)
        accepted = [torch.zeros(0, dtype=torch.long, device=batch.tokens.device)]
        with self.autocast():
            context = self.context(batch)
            for part in _parts(plan, _CHUNK_BLOCKS):
                normed = self.blocks(batch, part, context)
                for chunk in self.chunks(batch, part, normed):
                    targets = self.judge.targets(chunk.last, chunk.plan, self.num_predictions, False)
                    best = self.draft.block_logits(chunk.normed, chunk.previous).argmax(-1)
                    agrees = targets.is_labeled & (best == targets.label)
                    accepted.append(first_disagreement(agrees, targets.is_judged))
        most = torch.cat(accepted).clamp(max=num_draft_tokens)
        return Rounds(plan.anchors, most, plan.depths.clamp(max=num_draft_tokens))

    def run(self, batch: Batch, plan: BlockPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the differentiable loss of the plan's blocks, and all sums."""
        total = torch.zeros((), device=batch.tokens.device)
        sums = torch.zeros(self.num_sums, dtype=torch.float64, device=batch.tokens.device)
        if len(plan.spans):
            normed = self.blocks(batch, plan, self.context(batch))
            total, sums = self.hold(batch, plan, normed)
        sums[0] = total.detach()
        sums[-1] = plan.num_supervised
        return total, sums

    def blocks(self, batch: Batch, plan: BlockPlan, context: Sequence[KeysValues]) -> torch.Tensor:
        """Return the normed hidden states [n, K, D] of the slots that predict."""
        positions = batch.positions[plan.anchors]
        places = BlockPlaces(batch.documents, batch.positions, batch.documents[plan.anchors], positions)
        attend = self.make_attend(self.draft.config, places)
        return self.layers(batch.tokens[plan.anchors], positions, context, attend)

    def context(self, batch: Batch) -> list[KeysValues]:
        """Return each layer's keys and values of the batch's rows."""
        keys_values: list[KeysValues] = self.draft.context(batch.aux, batch.positions)
        return keys_values

    def layers(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: Sequence[KeysValues],
        attend: BlockAttend,
    ) -> torch.Tensor:
        """Return what the draft makes of blocks whose anchors [n] these are."""
        normed: torch.Tensor = self.draft(tokens, positions, context, attend)
        return normed

    def previous(self, batch: Batch, plan: BlockPlan) -> torch.Tensor:
        """Return the true token before each one that is predicted, [n, K]."""
        places = torch.arange(self.num_predictions, device=batch.tokens.device)
        return batch.tokens[(plan.anchors[:, None] + places).clamp(max=len(batch.tokens) - 1)]

    def chunks(self, batch: Batch, plan: BlockPlan, normed: torch.Tensor) -> Iterator[Chunk]:
        previous = self.previous(batch, plan)
        for start in range(0, len(normed), self.chunk_blocks):
            here = slice(start, start + self.chunk_blocks)
            yield Chunk(normed[here], previous[here], plan.part(here), batch.last)

    def hold(self, batch: Batch, plan: BlockPlan, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the differentiable loss of blocks with these hidden states, and their sums."""
        total = torch.zeros((), device=normed.device)
        sums = torch.zeros(self.num_sums, dtype=torch.float64, device=normed.device)
        for chunk in self.chunks(batch, plan, normed):
            loss, part = _again(self._hold, chunk) if normed.requires_grad else self._hold(chunk)
            total, sums = total + loss, sums + part
        return total, sums

    def _hold(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        targets = self.judge.targets(chunk.last, chunk.plan, self.num_predictions, self.needs_distribution)
        losses = block_losses(self.draft.block_logits(chunk.normed, chunk.previous), targets, self.mix)
        return self.sums_of(chunk.normed, chunk.previous, losses, targets)

    def sums_of(
        self, normed: torch.Tensor, previous: torch.Tensor, losses: BlockLosses, targets: BlockTargets
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the whole loss of some blocks, and their sums: 0 for the loss, then CE, agreed and judged by
        prediction, then the kind's own, then 0 for the supervised predictions."""
        loss, own = losses.loss, losses.loss.new_zeros(0)
        if self.further:
            more, own = self.further(self.draft, normed, previous, losses, targets.is_judged)
            loss = loss + more
        agrees = targets.is_labeled & (losses.best == targets.label)
        accepted = first_disagreement(agrees, targets.is_judged)
        places = torch.arange(self.num_predictions, device=normed.device)
        ce = losses.ce.masked_fill(~targets.is_labeled, 0.0).sum(0)
        agreed = (accepted[:, None] > places).sum(0)
        zero = ce.new_zeros(1)
        parts = (zero, ce, agreed, targets.is_judged.sum(0), own.detach(), zero)
        return loss, torch.cat([part.double() for part in parts])

    def ratios(self, sums: Sequence[float]) -> dict[str, float | list[float]]:
        """Return the loss per supervised prediction, prefix-joint agreement and CE by prediction."""
        k = self.num_predictions
        ce, agreed, judged = (sums[1 + i * k : 1 + (i + 1) * k] for i in range(3))
        own = self.further.ratios(sums[1 + 3 * k : -1]) if self.further else {}
        return {
            "loss": sums[0] / max(1, sums[-1]),
            "agreement": [a / max(1, j) for a, j in zip(agreed, judged, strict=True)],
            "cross_entropy": [c / max(1, j) for c, j in zip(ce, judged, strict=True)],
            **own,
        }


def _parts(plan: BlockPlan, num_blocks: int) -> Iterator[BlockPlan]:
    for start in range(0, len(plan.spans), num_blocks):
        yield plan.part(slice(start, start + num_blocks))


def _again(
    hold: Callable[[Chunk], tuple[torch.Tensor, torch.Tensor]], chunk: Chunk
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hold a chunk to its teacher and keep its hidden states only: the backward pass does it again."""

    def of_hidden(normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hold(Chunk(normed, chunk.previous, chunk.plan, chunk.last))

    result: tuple[torch.Tensor, torch.Tensor] = checkpoint(
        of_hidden, chunk.normed, use_reentrant=False, preserve_rng_state=False
    )
    return result
