"""Attention of draft rows on a GPU: one flash kernel over step-0 keys and a row's own later keys.

A row sees the step-0 keys ``first .. place`` (its document up to itself, or as much of that as its window
holds) and one own key for each later step so far. Own keys seed the running softmax, so the log-sum-exp that
comes out is the merged one. Query heads that share a key head are packed into one tile. Rows ascend, so a
tile's keys are one range.

Source: FlashAttention-2, arXiv 2307.08691; the extra own-row scores are those of EAGLE-3's unroll.
"""

import torch
import triton
import triton.language as tl

from eyas.drafters.eagle3.fused.attention_tiles import FORWARD, LOG2_E, constants_of
from eyas.kernels.head_layout import Heads


def attend(
    queries: torch.Tensor,
    first_kv: torch.Tensor,
    own_kv: torch.Tensor,
    own_index: torch.Tensor,
    first: torch.Tensor,
    place: torch.Tensor,
    heads: Heads,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write attention's output to ``out`` and return the merged log-sum-exp (base 2) [R, heads].

    Shapes: queries, out [R, heads * head_dim]; first_kv [M, 2 * kv heads * head_dim], keys then values;
    own_kv [S, the same]; own_index [R, own steps], a row's entries in own_kv; first, place [R].
    """
    num_rows = len(queries)
    lse = torch.empty(num_rows, heads.kv_heads * heads.group, dtype=torch.float32, device=queries.device)
    constants = constants_of(heads, FORWARD, queries.dtype)
    grid = (triton.cdiv(num_rows * constants["GROUP_P2"], constants["BLOCK_M"]), heads.kv_heads)
    _forward[grid](
        queries,
        first_kv,
        own_kv,
        own_index,
        first,
        place,
        out,
        lse,
        num_rows,
        own_index.shape[1],
        heads.head_dim**-0.5 * LOG2_E,
        **constants,
    )
    return lse


@triton.jit
def _forward_keys(
    acc, top, total, q, kv, first, place, head, begin, end, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over step-0 keys ``begin .. end - 1``."""
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, BLOCK_N)
    stride: tl.constexpr = 2 * KV_HEADS * HEAD_DIM
    for start in range(begin, end, BLOCK_N):
        key = start + n
        base = kv + key[:, None] * stride + head * HEAD_DIM + d[None, :]
        if MASKED:
            inside = (key < end)[:, None]
            k = tl.load(base, mask=inside, other=0.0)
            v = tl.load(base + KV_HEADS * HEAD_DIM, mask=inside, other=0.0)
        else:
            k = tl.load(base)
            v = tl.load(base + KV_HEADS * HEAD_DIM)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASKED:
            seen = (key[None, :] >= first[:, None]) & (key[None, :] <= place[:, None])
            scores = tl.where(seen, scores, -1.0e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weight = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def _forward(
    queries, kv, own_kv, own_index, first_of, place_of, out, lse, num_rows, num_own, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P2: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The last tiles see the most keys: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    i = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row, member = i // GROUP_P2, i % GROUP_P2
    live = (row < num_rows) & (member < GROUP)
    d = tl.arange(0, HEAD_DIM)
    at = (
        row[:, None] * (KV_HEADS * GROUP * HEAD_DIM)
        + (head * GROUP + member)[:, None] * HEAD_DIM
        + d[None, :]
    )
    q = tl.load(queries + at, mask=live[:, None], other=0.0)
    first = tl.load(first_of + row, mask=live, other=0)
    place = tl.load(place_of + row, mask=live, other=0)

    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    top = tl.full([BLOCK_M], -1.0e30, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for j in range(num_own):
        entry = tl.load(own_index + row * num_own + j, mask=live, other=0)
        base = own_kv + entry[:, None] * (2 * KV_HEADS * HEAD_DIM) + head * HEAD_DIM + d[None, :]
        k = tl.load(base, mask=live[:, None], other=0.0)
        v = tl.load(base + KV_HEADS * HEAD_DIM, mask=live[:, None], other=0.0)
        score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
        new_top = tl.maximum(top, score)
        weight, shrink = tl.exp2(score - new_top), tl.exp2(top - new_top)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + weight[:, None] * v.to(tl.float32)
        top = new_top

    first_row = (tile * BLOCK_M) // GROUP_P2
    last_row = tl.minimum(first_row + BLOCK_M // GROUP_P2, num_rows) - 1
    begin, end = tl.load(first_of + first_row), tl.load(place_of + last_row) + 1
    # Keys that every row of the tile sees need no mask; they are sought where all its rows begin at one key.
    shared = tl.load(place_of + first_row) + 1 - begin
    shared = tl.where(tl.load(first_of + last_row) == begin, shared // BLOCK_N * BLOCK_N, 0)
    acc, top, total = _forward_keys(
        acc, top, total, q, kv, first, place, head, begin, begin + shared, scale,
        KV_HEADS, HEAD_DIM, BLOCK_N, PRECISION, False,
    )  # fmt: skip
    acc, top, total = _forward_keys(
        acc, top, total, q, kv, first, place, head, begin + shared, end, scale,
        KV_HEADS, HEAD_DIM, BLOCK_N, PRECISION, True,
    )  # fmt: skip
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=live[:, None])
    tl.store(lse + row * (KV_HEADS * GROUP) + head * GROUP + member, top + tl.log2(total), mask=live)
