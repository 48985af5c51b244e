"""Flex attention of blocks: the same result as the plain one, and tiles that cover what is seen, no more."""

import pytest
import torch

from block_cases import BlockCase, make_block_case
from eyas.drafters.common.block.attention import BlockPlaces
from eyas.drafters.common.block.flex import TILE, FlexBlockAttention, tile_mask

SHAPES = [(5, (19, 5, 33, 11)), (16, (300, 150, 260)), (7, (128, 384))]


def case_of(
    size: int, lengths: tuple[int, ...], causal: bool, window: int | None, num_anchors: int = 30
) -> BlockCase:
    window = window and max(window, size)
    return make_block_case(size=size, lengths=lengths, causal=causal, window=window, num_anchors=num_anchors)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [9, None])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("size", "lengths"), SHAPES)
def test_flex_attention_is_the_plain_one(
    size: int, lengths: tuple[int, ...], causal: bool, window: int | None
) -> None:
    case = case_of(size, lengths, causal, window)
    batch = case.batch
    context = case.draft.context(batch.aux, batch.positions)
    expected, found = (
        objective.blocks(batch, batch.plan, context)
        for objective in (case.objective(), case.objective(make_attend=FlexBlockAttention))
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_anchors", [3, 40])
@pytest.mark.parametrize("window", [16, 140, None])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("size", "lengths"), SHAPES)
def test_tiles_hold_all_that_is_seen_once_and_full_ones_nothing_else(
    size: int, lengths: tuple[int, ...], causal: bool, window: int | None, num_anchors: int
) -> None:
    case = case_of(size, lengths, causal, window, num_anchors)
    batch, plan = case.batch, case.plan
    own_start = -(-len(batch.tokens) // TILE) * TILE
    places = BlockPlaces(
        batch.documents, batch.positions, batch.documents[plan.anchors], batch.positions[plan.anchors]
    )
    mask = tile_mask(case.draft.config, places, own_start)
    num_queries = len(plan.anchors) * size
    q, k = torch.arange(num_queries), torch.arange(own_start + num_queries)
    seen = mask.mask_mod(0, 0, q[:, None], k[None])  # (Q, keys)

    # What is seen, written out: slots in rows, context and slots in columns.
    block, slot = q // size, q % size
    anchor, document = batch.positions[plan.anchors][block], batch.documents[plan.anchors][block]
    position = (anchor + slot)[:, None]
    near = 1 << 30 if window is None else case.draft.config.sliding_window
    n = len(batch.tokens)
    of_context = (batch.documents == document[:, None]) & (batch.positions < anchor[:, None])
    of_context &= batch.positions > position - near
    assert torch.equal(seen[:, :n], of_context)
    assert not seen[:, n:own_start].any()
    of_own = (block == block[:, None]) & (torch.tensor(not causal) | (slot <= slot[:, None]))
    assert torch.equal(seen[:, own_start:], of_own)

    partial = zip(mask.kv_num_blocks[0, 0].tolist(), mask.kv_indices[0, 0].tolist(), strict=True)
    full = zip(mask.full_kv_num_blocks[0, 0].tolist(), mask.full_kv_indices[0, 0].tolist(), strict=True)
    for row, ((some, partly), (all_of, fully)) in enumerate(zip(partial, full, strict=True)):
        listed = partly[:some] + fully[:all_of]
        assert len(set(listed)) == len(listed), "a key would count twice"
        of_row = seen[row * TILE : (row + 1) * TILE]
        tiles = torch.nn.functional.pad(of_row, (0, -of_row.shape[1] % TILE)).unflatten(1, (-1, TILE))
        needed = tiles.any(2).any(0).nonzero().flatten().tolist()
        assert set(needed) <= set(listed)
        assert all(tiles[:, tile].all() for tile in fully[:all_of])


def test_long_contexts_are_mostly_full_tiles() -> None:
    case = case_of(16, (2000,), True, None, num_anchors=40)
    batch, plan = case.batch, case.plan
    places = BlockPlaces(
        batch.documents, batch.positions, batch.documents[plan.anchors], batch.positions[plan.anchors]
    )
    mask = tile_mask(case.draft.config, places, 2048)
    assert mask.full_kv_num_blocks.sum() > 2 * mask.kv_num_blocks.sum()
