"""Plain attention over a draft's rows, and the two ways in which their keys and values are kept.

A draft's layers compute queries, keys and values. The object that takes them knows which rows see which keys:
training keeps the keys of packed documents, decoding those of one sequence. With a window of w tokens the
query of position p sees the keys of positions above p - w, as in vLLM's kernels. A document's rows ascend by
one position each, so differences of rows are those of positions.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

KeysValues = tuple[torch.Tensor, torch.Tensor]


class Attend(Protocol):
    """Takes what a layer computed for rows and returns attention's output [R, heads, value_dim].

    Shapes: queries [R, heads, head_dim]; keys [M, kv heads, head_dim] and values [M, kv heads, value_dim].
    Where R < M only some of the rows have a query; the others leave their keys.
    """

    def __call__(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor: ...


class SequenceKeys:
    """The keys and values of one sequence, by layer. Each call appends rows; the last ones have queries."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.layers: dict[int, KeysValues] = {}

    @property
    def num_rows(self) -> int:
        return len(self.layers[0][0]) if self.layers else 0

    def fork(self) -> "SequenceKeys":
        """Return a copy, to which rows can be appended that this one never sees."""
        copy = SequenceKeys(self.window)
        copy.layers = dict(self.layers)
        return copy

    def __call__(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        if layer in self.layers:
            earlier_keys, earlier_values = self.layers[layer]
            keys, values = torch.cat([earlier_keys, keys]), torch.cat([earlier_values, values])
        self.layers[layer] = keys, values
        rows = torch.arange(len(keys) - len(queries), len(keys), device=keys.device)
        bounds = [(slice(0, len(queries)), slice(0, len(keys)))]
        return attend(queries, rows, (keys, values), (), bounds, self.window)


class PackedKeys:
    """The keys and values of packed documents, by layer: the first step's, and the rows' own of later steps.

    Shapes: documents [M], those of the first step's rows, ascending.
    """

    def __init__(self, documents: torch.Tensor, window: int | None) -> None:
        self.documents = documents
        self.window = window
        self.first: dict[int, KeysValues] = {}
        self.own: dict[int, list[KeysValues]] = {}
        self._every = torch.arange(len(documents), device=documents.device)
        self._bounds_of_every: Sequence[tuple[slice, slice]] | None = None
        self._is_first = True

    def begin(self, rows: torch.Tensor, kept: torch.Tensor | None = None) -> None:
        """Begin a step.

        Shapes: rows [R], the queries' rows among the first step's, ascending; kept [R], their indices among
        the
        rows of the step before, None at the first step.
        """
        self._rows = rows
        self._bounds = document_bounds(self.documents[rows], self.documents)
        self._is_first = kept is None
        if kept is not None:
            self.own = {
                layer: [(keys[kept], values[kept]) for keys, values in self.own.get(layer, ())]
                for layer in self.first
            }

    def __call__(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        if self._is_first:
            self.first[layer] = keys, values
        else:
            self.own[layer].append((keys, values))
        own = self.own.get(layer, ())
        if len(queries) < len(self.documents):
            return attend(queries, self._rows, self.first[layer], own, self._bounds, self.window)
        if self._bounds_of_every is None:
            self._bounds_of_every = document_bounds(self.documents, self.documents)
        return attend(queries, self._every, self.first[layer], own, self._bounds_of_every, self.window)


def attend(
    queries: torch.Tensor,
    rows: torch.Tensor,
    first_keys: tuple[torch.Tensor, torch.Tensor],
    own: Sequence[tuple[torch.Tensor, torch.Tensor]],
    document_bounds: Sequence[tuple[slice, slice]],
    window: int | None,
) -> torch.Tensor:
    """Attend row by row, document by document, with every score in one softmax.

    Shapes: queries [R, heads, head_dim]; rows [R], each row's place among the step-0 keys, ascending;
    first_keys: keys [M, kv heads, head_dim] and values [M, kv heads, value_dim]; own: the same [R, ...]
    of each later step so far. ``document_bounds`` holds, for each document, its slice of the queries
    and its slice of the step-0 keys. Each later step moved the query one position on from its row.
    Returns [R, heads, value_dim].
    """
    num_rows, num_heads, head_dim = queries.shape
    keys, values = first_keys
    num_kv = keys.shape[1]
    # (kv heads, group, R, head_dim): the queries that share a key/value head stand together.
    q = queries.unflatten(1, (num_kv, num_heads // num_kv)).permute(1, 2, 0, 3) * head_dim**-0.5
    steps_on = len(own)
    if window is not None:
        own = own[-window:]
    own_scores = [(q * k.permute(1, 0, 2)[:, None]).sum(-1, keepdim=True) for k, _ in own]
    attended = []
    for of_queries, of_keys in document_bounds:
        places = rows[of_queries]
        k = keys[of_keys].permute(1, 2, 0)[:, None]  # (kv heads, 1, head_dim, M_d)
        v = values[of_keys].permute(1, 0, 2)[:, None]  # (kv heads, 1, M_d, value_dim)
        key_places = torch.arange(of_keys.start, of_keys.stop, device=rows.device)
        hidden = key_places[None, :] > places[:, None]  # (R_d, M_d)
        if window is not None:
            hidden |= key_places[None, :] <= places[:, None] + steps_on - window
        scores = (q[:, :, of_queries] @ k).masked_fill(hidden, float("-inf"))
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
