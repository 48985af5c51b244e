"""Teacher rows: from full-vocabulary logits to the argmax and the distribution on the draft vocabulary."""

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 2048, 8


def restrict(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    probabilities: torch.Tensor,
    mass: torch.Tensor,
    negative_entropy: torch.Tensor,
    argmax: torch.Tensor,
    coverage: torch.Tensor | None = None,
) -> None:
    """Write each row's argmax over all ids, its softmax p over ``target_ids``, and the sums of p and p log p.

    Both sums are of p as it is stored. ``coverage`` takes the share of the softmax over all ids that
    ``target_ids`` have. Shapes: logits [r, V], target_ids [W], probabilities [r, W], mass, negative_entropy,
    argmax, coverage [r].
    """
    _restrict[(len(logits),)](
        logits,
        target_ids.int(),
        probabilities,
        mass,
        negative_entropy,
        argmax,
        mass if coverage is None else coverage,
        logits.shape[1],
        len(target_ids),
        WITH_COVERAGE=coverage is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


@triton.jit
def _restrict(
    logits, target_ids, probabilities, mass_of, entropy_of, argmax, coverage_of, vocab_size, width,
    WITH_COVERAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_row = logits + row * vocab_size
    i = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    best = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, vocab_size, BLOCK):
        at = start + i
        z = tl.load(z_row + at, mask=at < vocab_size, other=-float("inf")).to(tl.float32)
        best = tl.where(z > top, at, best)
        top = tl.maximum(top, z)
    shift, lane = tl.max(top, 0, return_indices=True)
    tl.store(argmax + row, tl.sum(tl.where(i == lane, best, 0), 0).to(tl.int64))

    # The shift is the maximum over all ids: where it lies outside the draft vocabulary the row carries no
    # loss, and its distribution is never read.
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = start + i
        ids = tl.load(target_ids + at, mask=at < width, other=0)
        z = tl.load(z_row + ids, mask=at < width, other=-float("inf")).to(tl.float32)
        total += tl.exp(z - shift)
    whole = tl.maximum(tl.sum(total, 0), 1.0e-30)
    if WITH_COVERAGE:
        of_all = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, vocab_size, BLOCK):
            at = start + i
            z = tl.load(z_row + at, mask=at < vocab_size, other=-float("inf")).to(tl.float32)
            of_all += tl.exp(z - shift)
        tl.store(coverage_of + row, tl.sum(total, 0) / tl.sum(of_all, 0))
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    entropy = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = start + i
        ids = tl.load(target_ids + at, mask=at < width, other=0)
        z = tl.load(z_row + ids, mask=at < width, other=-float("inf")).to(tl.float32)
        p = (tl.exp(z - shift) / whole).to(probabilities.dtype.element_ty)
        stored = p.to(tl.float32)
        mass += stored
        entropy += tl.where(stored > 0, stored * tl.log(stored), 0.0)
        tl.store(probabilities + row * width + at, p, mask=at < width)
    tl.store(mass_of + row, tl.sum(mass, 0))
    tl.store(entropy_of + row, tl.sum(entropy, 0))
