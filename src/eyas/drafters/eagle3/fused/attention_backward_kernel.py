"""The backward of ``attention_kernel``, through the merged log-sum-exp.

Three kernels: a row's own keys and its delta; the gradient of queries, over tiles of rows; that of step-0
keys and values, over tiles of keys. Rows ascend, so a key tile's rows are one range, most of it unmasked.
"""

import torch
import triton
import triton.language as tl

from eyas.drafters.eagle3.fused.attention_tiles import KEYS, LOG2_E, QUERIES, constants_of
from eyas.kernels.head_layout import Heads


def attend_backward(
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    queries: torch.Tensor,
    first_kv: torch.Tensor,
    own_kv: torch.Tensor,
    own_index: torch.Tensor,
    first: torch.Tensor,
    place: torch.Tensor,
    heads: Heads,
    grad_first_kv: torch.Tensor,
    grad_own_kv: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of the queries; add those of keys and values to the fp32 buffers given."""
    num_rows, num_keys = len(queries), len(first_kv)
    delta = torch.empty_like(lse)
    grad_queries = torch.empty_like(queries, dtype=torch.float32)
    scale = heads.head_dim**-0.5
    scales = (scale, scale * LOG2_E)
    _backward_own[(num_rows,)](
        queries,
        own_kv,
        own_index,
        out,
        grad_out,
        lse,
        delta,
        grad_queries,
        grad_own_kv,
        own_index.shape[1],
        *scales,
        KV_HEADS=heads.kv_heads,
        KV_HEADS_P2=triton.next_power_of_2(heads.kv_heads),
        GROUP=heads.group,
        GROUP_P2=triton.next_power_of_2(heads.group),
        HEAD_DIM=heads.head_dim,
        num_warps=4,
    )
    constants = constants_of(heads, QUERIES, queries.dtype)
    grid = (triton.cdiv(num_rows * constants["GROUP_P2"], constants["BLOCK_M"]), heads.kv_heads)
    _backward_queries[grid](
        queries, first_kv, first, place, grad_out, lse, delta, grad_queries, num_rows, *scales, **constants
    )
    constants = constants_of(heads, KEYS, queries.dtype)
    block = constants["BLOCK_N"]
    starts = torch.arange(0, num_keys, block, device=queries.device, dtype=place.dtype)
    ends = (starts + block - 1).clamp(max=num_keys - 1)
    # Rows begin .. end - 1 see some key of the tile; of them, full_begin .. full_end - 1 see all.
    begin = torch.searchsorted(place, starts, out_int32=True)
    end = torch.searchsorted(first, ends, right=True, out_int32=True)
    full_begin = torch.searchsorted(place, ends, out_int32=True)
    full_end = torch.searchsorted(first, starts, right=True, out_int32=True)
    ranges = torch.stack([begin, full_begin, full_end, end], dim=1)  # (tiles, 4)
    _backward_keys[(len(starts), heads.kv_heads)](
        queries,
        first_kv,
        first,
        place,
        grad_out,
        lse,
        delta,
        grad_first_kv,
        ranges,
        num_keys,
        *scales,
        **constants,
    )
    return grad_queries


@triton.jit
def _queries_keys(
    acc, q, grad, lse, delta, kv, first, place, head, begin, end, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the step-0 keys' part of the gradient of the queries."""
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
        weight = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
        if MASKED:
            seen = (key[None, :] >= first[:, None]) & (key[None, :] <= place[:, None])
            weight = tl.where(seen, weight, 0.0)
        grad_scores = weight * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        acc = tl.dot(grad_scores.to(k.dtype), k, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _backward_own(
    queries, own_kv, own_index, out, grad_out, lse_of, delta_of, grad_queries, grad_own_kv, num_own,
    scale, scale_log2,
    KV_HEADS: tl.constexpr, KV_HEADS_P2: tl.constexpr, GROUP: tl.constexpr, GROUP_P2: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """One row, all heads: its delta, its own keys' gradients, and their part of its queries'."""
    row = tl.program_id(0)
    head = tl.arange(0, KV_HEADS_P2)[:, None, None]
    member = tl.arange(0, GROUP_P2)[None, :, None]
    d = tl.arange(0, HEAD_DIM)[None, None, :]
    live = (head < KV_HEADS) & (member < GROUP)
    at = row * (KV_HEADS * GROUP * HEAD_DIM) + (head * GROUP + member) * HEAD_DIM + d
    q = tl.load(queries + at, mask=live, other=0.0).to(tl.float32)
    grad = tl.load(grad_out + at, mask=live, other=0.0).to(tl.float32)
    output = tl.load(out + at, mask=live, other=0.0).to(tl.float32)
    # (kv heads, group)
    head_2, member_2 = tl.arange(0, KV_HEADS_P2)[:, None], tl.arange(0, GROUP_P2)[None, :]
    live_2 = (head_2 < KV_HEADS) & (member_2 < GROUP)
    statistics = row * (KV_HEADS * GROUP) + head_2 * GROUP + member_2
    lse = tl.load(lse_of + statistics, mask=live_2, other=0.0)
    delta = tl.sum(grad * output, 2)
    tl.store(delta_of + statistics, delta, mask=live_2)

    acc = tl.zeros([KV_HEADS_P2, GROUP_P2, HEAD_DIM], dtype=tl.float32)
    kv_at = tl.arange(0, KV_HEADS_P2)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    kv_live = (tl.arange(0, KV_HEADS_P2) < KV_HEADS)[:, None]
    for j in range(num_own):
        entry = tl.load(own_index + row * num_own + j) * (2 * KV_HEADS * HEAD_DIM)
        k = tl.load(own_kv + entry + kv_at, mask=kv_live, other=0.0).to(tl.float32)
        v = tl.load(own_kv + entry + KV_HEADS * HEAD_DIM + kv_at, mask=kv_live, other=0.0).to(tl.float32)
        weight = tl.exp2(tl.sum(q * k[:, None, :], 2) * scale_log2 - lse)
        weight = tl.where(live_2, weight, 0.0)
        grad_score = weight * (tl.sum(grad * v[:, None, :], 2) - delta) * scale
        acc += grad_score[:, :, None] * k[:, None, :]
        # An entry belongs to one row alone: a plain add is safe.
        base = grad_own_kv + entry + kv_at
        old = tl.load(base, mask=kv_live, other=0.0)
        tl.store(base, old + tl.sum(grad_score[:, :, None] * q, 1), mask=kv_live)
        old = tl.load(base + KV_HEADS * HEAD_DIM, mask=kv_live, other=0.0)
        tl.store(base + KV_HEADS * HEAD_DIM, old + tl.sum(weight[:, :, None] * grad, 1), mask=kv_live)
    tl.store(grad_queries + at, acc, mask=live)


@triton.jit
def _backward_queries(
    queries, kv, first_of, place_of, grad_out, lse_of, delta_of, grad_queries, num_rows, scale, scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P2: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the step-0 keys' part to the gradient of the queries."""
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
    statistics = row * (KV_HEADS * GROUP) + head * GROUP + member
    q = tl.load(queries + at, mask=live[:, None], other=0.0)
    grad = tl.load(grad_out + at, mask=live[:, None], other=0.0)
    first = tl.load(first_of + row, mask=live, other=0)
    place = tl.load(place_of + row, mask=live, other=0)
    lse = tl.load(lse_of + statistics, mask=live, other=0.0)
    delta = tl.load(delta_of + statistics, mask=live, other=0.0)
    acc = tl.load(grad_queries + at, mask=live[:, None], other=0.0) / scale

    first_row = (tile * BLOCK_M) // GROUP_P2
    last_row = tl.minimum(first_row + BLOCK_M // GROUP_P2, num_rows) - 1
    begin, end = tl.load(first_of + first_row), tl.load(place_of + last_row) + 1
    shared = tl.load(place_of + first_row) + 1 - begin
    shared = tl.where(tl.load(first_of + last_row) == begin, shared // BLOCK_N * BLOCK_N, 0)
    acc = _queries_keys(
        acc, q, grad, lse, delta, kv, first, place, head, begin, begin + shared, scale_log2,
        KV_HEADS, HEAD_DIM, BLOCK_N, PRECISION, False,
    )  # fmt: skip
    acc = _queries_keys(
        acc, q, grad, lse, delta, kv, first, place, head, begin + shared, end, scale_log2,
        KV_HEADS, HEAD_DIM, BLOCK_N, PRECISION, True,
    )  # fmt: skip
    tl.store(grad_queries + at, acc * scale, mask=live[:, None])


@triton.jit
def _keys_rows(
    grad_k, grad_v, k, v, key, queries, grad_out, lse_of, delta_of, first_of, place_of, head,
    begin, end, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P2: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what packed rows ``begin .. end - 1`` send to the keys and values of the tile."""
    d = tl.arange(0, HEAD_DIM)
    for start in range(begin, end, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        row, member = i // GROUP_P2, i % GROUP_P2
        live = (i < end) & (member < GROUP)
        at = (
            row[:, None] * (KV_HEADS * GROUP * HEAD_DIM)
            + (head * GROUP + member)[:, None] * HEAD_DIM
            + d[None, :]
        )
        statistics = row * (KV_HEADS * GROUP) + head * GROUP + member
        # A dead row's log-sum-exp makes its weights zero.
        lse = tl.load(lse_of + statistics, mask=live, other=float("inf"))
        delta = tl.load(delta_of + statistics, mask=live, other=0.0)
        q = tl.load(queries + at, mask=live[:, None], other=0.0)
        grad = tl.load(grad_out + at, mask=live[:, None], other=0.0)
        weight = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :]  # (keys, rows)
        weight = tl.exp2(weight)
        if MASKED:
            first = tl.load(first_of + row, mask=live, other=0)
            place = tl.load(place_of + row, mask=live, other=-1)
            weight = tl.where(
                (key[:, None] >= first[None, :]) & (key[:, None] <= place[None, :]), weight, 0.0
            )
        grad_v = tl.dot(weight.to(grad.dtype), grad, grad_v, input_precision=PRECISION)
        grad_scores = weight * (tl.dot(v, tl.trans(grad), input_precision=PRECISION) - delta[None, :])
        grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit
def _backward_keys(
    queries, kv, first_of, place_of, grad_out, lse_of, delta_of, grad_kv, ranges,
    num_keys, scale, scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P2: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients of one tile of step-0 keys and values."""
    tile, head = tl.program_id(0), tl.program_id(1)
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, HEAD_DIM)
    inside = (key < num_keys)[:, None]
    at = key[:, None] * (2 * KV_HEADS * HEAD_DIM) + head * HEAD_DIM + d[None, :]
    k = tl.load(kv + at, mask=inside, other=0.0)
    v = tl.load(kv + at + KV_HEADS * HEAD_DIM, mask=inside, other=0.0)
    grad_k = tl.zeros([BLOCK_N, HEAD_DIM], dtype=tl.float32)
    grad_v = tl.zeros([BLOCK_N, HEAD_DIM], dtype=tl.float32)
    begin, end = tl.load(ranges + 4 * tile) * GROUP_P2, tl.load(ranges + 4 * tile + 3) * GROUP_P2
    full_begin, full_end = (
        tl.load(ranges + 4 * tile + 1) * GROUP_P2,
        tl.load(ranges + 4 * tile + 2) * GROUP_P2,
    )
    full_end = tl.minimum(full_end, end)
    full_begin = tl.minimum(full_begin, end)
    full_end = tl.maximum(full_end, full_begin)
    grad_k, grad_v = _keys_rows(
        grad_k, grad_v, k, v, key, queries, grad_out, lse_of, delta_of, first_of, place_of, head,
        begin, full_begin, scale_log2, KV_HEADS, GROUP, GROUP_P2, HEAD_DIM, BLOCK_M, PRECISION, True,
    )  # fmt: skip
    grad_k, grad_v = _keys_rows(
        grad_k, grad_v, k, v, key, queries, grad_out, lse_of, delta_of, first_of, place_of, head,
        full_begin, full_end, scale_log2, KV_HEADS, GROUP, GROUP_P2, HEAD_DIM, BLOCK_M, PRECISION, False,
    )  # fmt: skip
    grad_k, grad_v = _keys_rows(
        grad_k, grad_v, k, v, key, queries, grad_out, lse_of, delta_of, first_of, place_of, head,
        full_end, end, scale_log2, KV_HEADS, GROUP, GROUP_P2, HEAD_DIM, BLOCK_M, PRECISION, True,
    )  # fmt: skip
    old = tl.load(grad_kv + at, mask=inside, other=0.0)
    tl.store(grad_kv + at, old + grad_k * scale, mask=inside)
    old = tl.load(grad_kv + at + KV_HEADS * HEAD_DIM, mask=inside, other=0.0)
    tl.store(grad_kv + at + KV_HEADS * HEAD_DIM, old + grad_v, mask=inside)
