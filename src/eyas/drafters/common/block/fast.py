"""The path for GPUs: flex attention, layers and a loss by kernels, bf16 copies of fp32 masters.

Without a GPU the same path takes the plain twins of the kernels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from eyas.drafters.common.block.anchors import BlockPlan
from eyas.drafters.common.block.chunked_loss import Job, chunked_losses, losses_and_gradient
from eyas.drafters.common.block.flex import FlexBlockAttention
from eyas.drafters.common.block.judge import BlockJudge
from eyas.drafters.common.block.loss import BlockLosses, BlockTargets, LossMix
from eyas.drafters.common.block.model import BlockAttend, KeysValues
from eyas.drafters.common.block.objective import CHUNK_ROWS, Batch, BlockObjective, FurtherLoss, MakeAttend


class FastBlockObjective(BlockObjective):
    """Runs a copy of the draft whose parameters are in the compute dtype.

    A gradient of the copy is added to its master's in fp32 and forgotten, parameter by parameter. Where ranks
    hold slices of the masters (``sharded``), the draft itself is in the compute dtype, and no copy is made.
    """

    def __init__(
        self,
        draft: Any,
        judge: BlockJudge,
        mix: LossMix,
        dtype: torch.dtype,
        device: torch.device,
        further: FurtherLoss | None = None,
        sharded: bool = False,
        make_attend: MakeAttend = FlexBlockAttention,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        super().__init__(draft, judge, mix, dtype, device, further, make_attend, chunk_rows)
        self.uses_kernels = device.type == "cuda"
        draft.lm_head.weight = nn.Parameter(judge.rows, requires_grad=False)
        self.copies: Mapping[torch.Tensor, torch.Tensor] | None = None
        if not sharded:
            self.draft = _in_dtype(draft, dtype)
            copies = self.draft.trainable()
            self.copies = {p: copies[name] for name, p in draft.trainable().items()}
            for master, copy in self.copies.items():
                copy.register_post_accumulate_grad_hook(_Add(master))

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters, which something other than the optimizer changed."""
        if self.copies:
            torch._foreach_copy_(list(self.copies.values()), list(self.copies.keys()))

    def autocast(self) -> Any:
        """Everything is in the compute dtype already, except what is in fp32 on purpose."""
        return torch.autocast(self._device.type, enabled=False)

    def context(self, batch: Batch) -> list[KeysValues]:
        if not self.uses_kernels:
            return super().context(batch)
        from eyas.drafters.common.block.fused_layers import fused_context

        return fused_context(self.draft, batch.aux, batch.positions)

    def layers(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: Sequence[KeysValues],
        attend: BlockAttend,
    ) -> torch.Tensor:
        if not self.uses_kernels:
            return super().layers(tokens, positions, context, attend)
        from eyas.drafters.common.block.fused_layers import fused_blocks

        return fused_blocks(self.draft, tokens, positions, context, attend)

    def hold(self, batch: Batch, plan: BlockPlan, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        previous = self.previous(batch, plan)
        transition, markov = self.draft.bias_parts(previous)
        scale, k = self.draft.config.logit_scale, self.num_predictions

        def hold(logits: torch.Tensor, here: slice) -> tuple[BlockLosses, BlockTargets, torch.Tensor]:
            part = plan.part(here)
            if self.uses_kernels:
                from eyas.drafters.common.block.fused_loss import fused_losses_

                return fused_losses_(
                    logits, scale, self.judge, batch.last, part, self.mix, self.needs_distribution
                )
            targets = self.judge.targets(batch.last, part, k, self.needs_distribution)
            losses, gradient = losses_and_gradient(logits, scale, targets, self.mix)
            return losses, targets, gradient

        job = Job(self.judge.rows, hold, self.chunk_blocks)
        losses, targets = chunked_losses(normed, transition, markov, job)
        return self.sums_of(normed, previous, losses, targets)


class _Add:
    """Adds the gradient of a parameter's copy to the parameter's own."""

    def __init__(self, master: torch.Tensor) -> None:
        self.master = master

    @torch.no_grad()
    def __call__(self, copy: torch.Tensor) -> None:
        assert copy.grad is not None
        if self.master.grad is None:
            self.master.grad = copy.grad.float()
        else:
            self.master.grad += copy.grad
        copy.grad = None


def _in_dtype(draft: Any, dtype: torch.dtype) -> Any:
    """Return a draft with copies of the parameters in ``dtype``; what is frozen is shared."""
    with torch.device("meta"):
        copy = type(draft)(draft.config)
    copy.rotary = draft.rotary
    for name, parameter in draft.named_parameters():
        owner, _, last = name.rpartition(".")
        trained = parameter.requires_grad
        value = parameter.detach().to(dtype, copy=True) if trained else parameter.detach()
        setattr(copy.get_submodule(owner), last, nn.Parameter(value, requires_grad=trained))
    return copy
