"""Attention of blocks in plain torch: every score of a slot in one softmax, document by document.

A slot at position p sees the context of its document at the positions before its anchor, and the slots of
its own block: those up to itself where the draft is causal, else all. Of both it sees only positions
above p - window. That is what vLLM's kernels compute from a query's own position.
"""

from dataclasses import dataclass

import torch

from eyas.drafters.common.block.config import BlockConfig
from eyas.drafters.common.block.model import KeysValues


@dataclass(frozen=True)
class BlockPlaces:
    """Where context rows and blocks stand.

    Shapes: documents, positions [N] of context rows, documents ascending; block_documents,
    anchor_positions [n] of blocks, ascending in the packed order.
    """

    documents: torch.Tensor
    positions: torch.Tensor
    block_documents: torch.Tensor
    anchor_positions: torch.Tensor

    @classmethod
    def of_sequence(cls, num_context: int, anchor_position: int, device: torch.device) -> "BlockPlaces":
        """Return the places of one block behind a context of one sequence."""
        return cls(
            torch.zeros(num_context, dtype=torch.long, device=device),
            torch.arange(num_context, device=device),
            torch.zeros(1, dtype=torch.long, device=device),
            torch.tensor([anchor_position], device=device),
        )


class PlainBlockAttention:
    """Computes each document's scores whole."""

    def __init__(self, config: BlockConfig, places: BlockPlaces) -> None:
        self.size, self.causal, self.window = config.block_size, config.causal, config.sliding_window
        self.places = places
        documents, counts = torch.unique_consecutive(places.block_documents, return_counts=True)
        starts = torch.searchsorted(places.documents, documents).tolist()
        stops = torch.searchsorted(places.documents, documents, right=True).tolist()
        self.bounds: list[tuple[slice, slice]] = []  # of each document with blocks: its blocks, its context
        block = 0
        for count, start, stop in zip(counts.tolist(), starts, stops, strict=True):
            self.bounds.append((slice(block, block + count), slice(start, stop)))
            block += count

    def __call__(self, queries: torch.Tensor, context: KeysValues, own: KeysValues) -> torch.Tensor:
        num_kv, head_dim = own[0].shape[1:]
        groups = queries.shape[1] // num_kv
        # (kv heads, group, n, B, head_dim): the queries that share a key/value head stand together.
        q = queries.unflatten(0, (-1, self.size)).unflatten(2, (num_kv, groups)).permute(2, 3, 0, 1, 4)
        q = q * head_dim**-0.5
        own_keys, own_values = (x.unflatten(0, (-1, self.size)).permute(2, 0, 1, 3) for x in own)
        attended = [
            self._document(
                q[:, :, blocks],
                (context[0][rows], context[1][rows]),
                (own_keys[:, blocks], own_values[:, blocks]),
                self._hidden_context(blocks, rows),
            )
            for blocks, rows in self.bounds
        ]
        if not attended:
            return torch.zeros_like(queries)
        return torch.cat(attended, dim=2).permute(2, 3, 0, 1, 4).flatten(2, 3).flatten(0, 1)

    def _document(
        self, q: torch.Tensor, context: KeysValues, own: KeysValues, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Attend from the blocks of one document; ``hidden`` [n, B, T] says which context they do not see.

        Shapes: q [kv heads, group, n, B, head_dim]; context [T, kv heads, head_dim]; own
        [kv heads, n, B, head_dim].
        """
        keys, values = (x.permute(1, 0, 2)[:, None] for x in context)  # (kv heads, 1, T, head_dim)
        to_context = (q.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, q.shape[2:4])
        to_context = to_context.masked_fill(hidden, float("-inf"))
        to_own = q @ own[0][:, None].transpose(-1, -2)  # (kv heads, group, n, B, B)
        to_own = to_own.masked_fill(self._hidden_own(q.device), float("-inf"))
        weights = torch.softmax(torch.cat([to_context, to_own], dim=-1).float(), dim=-1).to(q.dtype)
        of_context, of_own = weights.split([keys.shape[2], self.size], dim=-1)
        out = (of_context.flatten(2, 3) @ values).unflatten(2, q.shape[2:4])
        return out + of_own @ own[1][:, None]

    def _hidden_context(self, blocks: slice, rows: slice) -> torch.Tensor:
        anchors = self.places.anchor_positions[blocks, None, None]
        positions = self.places.positions[rows]
        hidden = (positions >= anchors).expand(-1, self.size, -1)
        if self.window is None:
            return hidden
        slots = anchors + torch.arange(self.size, device=anchors.device)[:, None]
        return hidden | (positions <= slots - self.window)

    def _hidden_own(self, device: torch.device) -> torch.Tensor:
        everything = torch.ones(self.size, self.size, dtype=torch.bool, device=device)
        return everything.triu(1) if self.causal else ~everything
