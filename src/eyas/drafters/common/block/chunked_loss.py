"""The loss of blocks together with its gradient, some rows of logits at a time.

A chunk's logits are made, held to the teacher and turned into the gradient of the hidden states at once, so
the backward pass has nothing left to compute, and logits of one chunk exist at a time. The head is frozen and
has no gradient. In fp32 this is the plain path's loss and gradient; on a GPU the products are in bf16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eyas.drafters.common.block.loss import BlockLosses, BlockTargets, LossMix, prediction_weights

# Holds the logits [c, K, W] of some of the blocks to the teacher: their losses, what they were held to, and
# the gradient of the loss with respect to the logits, which it may write over them.
Hold = Callable[[torch.Tensor, slice], tuple[BlockLosses, BlockTargets, torch.Tensor]]


@dataclass(frozen=True)
class Job:
    """What does not change from chunk to chunk. ``head`` [W, D] is frozen."""

    head: torch.Tensor
    hold: Hold
    chunk_blocks: int


def chunked_losses(
    normed: torch.Tensor, transition: torch.Tensor | None, markov: torch.Tensor | None, job: Job
) -> tuple[BlockLosses, BlockTargets]:
    """Return the losses of all blocks, differentiable, and what they were held to but for distributions.

    Shapes: normed [n, K, D]; transition [n, K, r] and markov [W, r] make the bias of the logits, where there
    is one.
    """
    loss, ce, best, overlap, label, is_judged, is_labeled = _ChunkedLoss.apply(
        normed, transition, markov, job
    )
    return BlockLosses(loss, ce, best, overlap), BlockTargets(label, is_judged, is_labeled)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, normed: torch.Tensor, transition: torch.Tensor | None, markov: torch.Tensor | None, job: Job
    ) -> tuple[torch.Tensor, ...]:
        num_blocks, predictions, _ = normed.shape
        shape = (num_blocks, predictions)
        loss = torch.zeros((), dtype=torch.float32, device=normed.device)
        ce, overlap = (torch.empty(shape, dtype=torch.float32, device=normed.device) for _ in range(2))
        best, label = (torch.empty(shape, dtype=torch.long, device=normed.device) for _ in range(2))
        judged, labeled = (torch.empty(shape, dtype=torch.bool, device=normed.device) for _ in range(2))
        of_normed = torch.empty_like(normed)
        of_transition = None if transition is None else torch.empty_like(transition)
        of_markov = None if markov is None else torch.zeros_like(markov, dtype=torch.float32)
        for start in range(0, num_blocks, job.chunk_blocks):
            here = slice(start, start + job.chunk_blocks)
            rows = normed[here].flatten(0, 1)
            logits = rows @ job.head.T
            if transition is not None and markov is not None:
                logits.addmm_(transition[here].flatten(0, 1), markov.T)
            losses, targets, gradient = job.hold(logits.unflatten(0, (-1, predictions)), here)
            loss += losses.loss
            ce[here], best[here], overlap[here] = losses.ce, losses.best, losses.overlap
            label[here], judged[here], labeled[here] = targets.label, targets.is_judged, targets.is_labeled
            gradient = gradient.flatten(0, 1)
            of_normed[here] = (gradient @ job.head).unflatten(0, (-1, predictions))
            if transition is not None and markov is not None:
                assert of_transition is not None
                assert of_markov is not None
                of_transition[here] = (gradient @ markov).unflatten(0, (-1, predictions))
                of_markov += gradient.T @ transition[here].flatten(0, 1)
        ctx.save_for_backward(of_normed, of_transition, of_markov)
        ctx.markov_dtype = None if markov is None else markov.dtype
        ctx.mark_non_differentiable(ce, best, overlap, label, judged, labeled)
        return loss, ce, best, overlap, label, judged, labeled

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *others: Any) -> tuple[torch.Tensor | None, ...]:
        of_normed, of_transition, of_markov = ctx.saved_tensors
        if of_transition is None:
            return of_normed * grad_loss.to(of_normed.dtype), None, None, None
        return (
            of_normed * grad_loss.to(of_normed.dtype),
            of_transition * grad_loss.to(of_transition.dtype),
            (of_markov * grad_loss).to(ctx.markov_dtype),
            None,
        )


def losses_and_gradient(
    logits: torch.Tensor, scale: float, targets: BlockTargets, mix: LossMix
) -> tuple[BlockLosses, torch.Tensor]:
    """Return what ``block_losses`` does of logits [n, K, W] times ``scale``, and its gradient with respect to
    the logits."""
    if scale != 1.0:
        logits *= scale
    log_q = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    ce = -log_q.gather(-1, targets.label[..., None]).squeeze(-1)
    weights = prediction_weights(ce, targets, mix).masked_fill(~targets.is_labeled, 0.0)
    of_prediction = mix.ce * ce
    overlap = torch.full_like(ce, float("nan"))
    q = log_q.exp()
    gradient = q * (mix.ce + mix.kl)
    gradient.scatter_add_(-1, targets.label[..., None], torch.full_like(ce, -mix.ce)[..., None])
    if targets.probabilities is not None and targets.mass is not None:
        p = targets.probabilities
        if mix.kl:
            of_prediction = of_prediction + mix.kl * (torch.xlogy(p, p) - p * log_q).sum(-1)
            gradient -= mix.kl * p
        if mix.l1:
            of_prediction = of_prediction + mix.l1 * (q - p).abs().sum(-1)
            sign = torch.sign(q - p)
            inner = (q * sign).sum(-1, keepdim=True)
            gradient += mix.l1 * q * (sign - inner)
        overlap = torch.minimum(p * targets.mass[..., None], q).sum(-1)
    gradient *= weights[..., None]
    losses = BlockLosses((weights * of_prediction).sum(), ce, logits.argmax(-1), overlap)
    return losses, gradient.to(logits.dtype) * scale
