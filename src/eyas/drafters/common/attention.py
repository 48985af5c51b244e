"""Attention of draft rows: step-0 keys of their document so far, and their own keys of later steps."""

from collections.abc import Sequence

import torch


def attend(
    queries: torch.Tensor,
    rows: torch.Tensor,
    first_keys: tuple[torch.Tensor, torch.Tensor],
    own: Sequence[tuple[torch.Tensor, torch.Tensor]],
    document_bounds: Sequence[tuple[slice, slice]],
) -> torch.Tensor:
    """Attend row by row, document by document, with every score in one softmax.

    Shapes: queries [R, heads, head_dim]; rows [R], each row's place among the step-0 keys, ascending;
    first_keys: keys [M, kv heads, head_dim] and values [M, kv heads, value_dim]; own: the same [R, ...]
    of each later step so far. ``document_bounds`` holds, for each document, its slice of the queries
    and its slice of the step-0 keys. Returns [R, heads, value_dim].
    """
    num_rows, num_heads, head_dim = queries.shape
    keys, values = first_keys
    num_kv = keys.shape[1]
    # (kv heads, group, R, head_dim): the queries that share a key/value head stand together.
    q = queries.unflatten(1, (num_kv, num_heads // num_kv)).permute(1, 2, 0, 3) * head_dim**-0.5
    own_scores = [(q * k.permute(1, 0, 2)[:, None]).sum(-1, keepdim=True) for k, _ in own]
    attended = []
    for of_queries, of_keys in document_bounds:
        places = rows[of_queries]
        k = keys[of_keys].permute(1, 2, 0)[:, None]  # (kv heads, 1, head_dim, M_d)
        v = values[of_keys].permute(1, 0, 2)[:, None]  # (kv heads, 1, M_d, value_dim)
        key_places = torch.arange(of_keys.start, of_keys.stop, device=rows.device)
        future = key_places[None, :] > places[:, None]  # (R_d, M_d)
        scores = (q[:, :, of_queries] @ k).masked_fill(future, float("-inf"))
        scores = torch.cat([scores, *(s[:, :, of_queries] for s in own_scores)], dim=-1)
        weights = torch.softmax(scores.float(), dim=-1).to(v.dtype)
        out = weights[..., : v.shape[2]] @ v
        for step, (_, own_v) in enumerate(own):
            weight = weights[..., v.shape[2] + step, None]
            out = out + weight * own_v[of_queries].permute(1, 0, 2)[:, None]
        attended.append(out)
    if not attended:
        return queries.new_zeros(num_rows, num_heads, values.shape[-1])
    return torch.cat(attended, dim=2).permute(2, 0, 1, 3).flatten(1, 2)


def document_bounds(row_documents: torch.Tensor, key_documents: torch.Tensor) -> list[tuple[slice, slice]]:
    """Return each document's slice of the rows and of the keys; both are sorted by document.

    Documents without rows need no attention and have no entry.
    """
    documents, counts = torch.unique_consecutive(row_documents, return_counts=True)
    starts = torch.searchsorted(key_documents, documents).tolist()
    stops = torch.searchsorted(key_documents, documents, right=True).tolist()
    bounds, row = [], 0
    for count, start, stop in zip(counts.tolist(), starts, stops, strict=True):
        bounds.append((slice(row, row + count), slice(start, stop)))
        row += count
    return bounds
