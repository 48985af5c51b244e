"""Attention of blocks by torch's flex attention: one call for all slots, its mask made of tiles.

Keys are the context rows, padded to a whole tile, and after them the blocks' own slots. Which tiles a tile of
queries needs follows from its first and last block, because anchors ascend. No whole mask is ever made.
There is no backward pass on a CPU; ``PlainBlockAttention`` computes the same.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from eyas.drafters.common.block.attention import BlockPlaces
from eyas.drafters.common.block.config import BlockConfig
from eyas.drafters.common.block.model import KeysValues

TILE = 128
# Fewer queries than a tile would go to torch's decoding kernel, which has no backward pass nor float32 tiles.
_OPTIONS: Any = {"FORCE_USE_FLEX_ATTENTION": True}


class FlexBlockAttention:
    """``places`` must have its documents one after another, with positions that restart in each."""

    def __init__(self, config: BlockConfig, places: BlockPlaces) -> None:
        self.num_context = len(places.documents)
        self.pad = -self.num_context % TILE
        self.mask = tile_mask(config, places, self.num_context + self.pad)

    def __call__(self, queries: torch.Tensor, context: KeysValues, own: KeysValues) -> torch.Tensor:
        keys, values = (
            torch.cat([F.pad(c, (0, 0, 0, 0, 0, self.pad)), o]) for c, o in zip(context, own, strict=True)
        )
        out: torch.Tensor = _flex(queries.is_cuda)(
            queries.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            block_mask=self.mask,
            enable_gqa=True,
            kernel_options=_OPTIONS if queries.is_cuda else None,
        )
        return out[0].transpose(0, 1)


@cache
def _flex(compiled: bool) -> Callable[..., Any]:
    if not compiled:
        return flex_attention
    return torch.compile(flex_attention, dynamic=True)


def tile_mask(config: BlockConfig, places: BlockPlaces, own_start: int) -> BlockMask:
    """Return the mask of all slots over the context and, from key ``own_start`` on, the slots themselves."""
    size, causal = config.block_size, config.causal
    num_blocks, device = len(places.anchor_positions), places.documents.device
    # One packed row looks back over all of its document at most.
    window = config.sliding_window or 1 << 30
    starts = torch.searchsorted(places.documents, places.block_documents)  # of each block's document
    anchors = starts + places.anchor_positions  # packed
    lowest = torch.maximum(starts, anchors - window + 1)  # what slot 0 sees first

    # A tile may reach beyond the last block or row: the tables have entries there that nothing matches.
    table_anchors = F.pad(anchors, (0, TILE), value=-1)
    table_lowest = F.pad(starts, (0, TILE), value=0)
    offset = torch.tensor(own_start, device=device)

    def mask_mod(b: Any, h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        block, slot = query // size, query % size
        anchor = table_anchors[block]
        is_context = (key < anchor) & (key >= table_lowest[block]) & (key > anchor + slot - window)
        place = key - offset
        is_own = (place >= 0) & (place // size == block)
        if causal:
            is_own = is_own & (place % size <= slot)
        return is_context | is_own

    num_queries = num_blocks * size
    first_query = torch.arange(0, num_queries, TILE, device=device)
    first = first_query // size
    last = ((first_query + TILE - 1) // size).clamp(max=num_blocks - 1)
    begin, end = lowest[first] // TILE, -(-anchors[last] // TILE)
    # Tiles that every slot of the query tile sees whole: of one document, before the first anchor, within the
    # window of the last slot.
    near = torch.maximum(starts[last], anchors[last] + size - window)
    whole_begin = -(-near // TILE)
    whole_end = torch.where(starts[first] == starts[last], anchors[first] // TILE, 0)
    whole_begin = torch.minimum(torch.maximum(whole_begin, begin), end)
    whole_end = torch.minimum(torch.maximum(whole_end, whole_begin), end)
    own_begin = (own_start + first * size) // TILE
    own_end = -(-(own_start + (last + 1) * size) // TILE)

    num_tiles = -(-(own_start + num_queries) // TILE)
    partial = _join([(begin, whole_begin), (whole_end, end), (own_begin, own_end)], num_tiles)
    full = _join([(whole_begin, whole_end)], num_tiles)
    return BlockMask.from_kv_blocks(
        *partial,
        *full,
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod,
        seq_lengths=(num_queries, own_start + num_queries),
    )


def _join(
    ranges: list[tuple[torch.Tensor, torch.Tensor]], num_tiles: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many tiles the ranges name for each query tile, [1, 1, Q], and which, [1, 1, Q, tiles]."""
    begins, ends = (torch.stack(parts, 1) for parts in zip(*ranges, strict=True))  # (Q, ranges)
    counts = (ends - begins).clamp(min=0)
    stops = counts.cumsum(1)
    places = torch.arange(num_tiles, device=counts.device).expand(len(counts), -1).contiguous()
    which = torch.searchsorted(stops, places, right=True).clamp(max=len(ranges) - 1)
    tiles = begins.gather(1, which) + places - (stops - counts).gather(1, which)
    used = places < stops[:, -1:]
    tiles = torch.where(used, tiles, 0)
    return stops[:, -1].int()[None, None], tiles.int()[None, None]
