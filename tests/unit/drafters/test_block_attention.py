"""Which keys a slot's attention reads: changed one by one, only those in sight change the result."""

import pytest
import torch

from block_cases import make_block_case
from eyas.drafters.common.block.attention import BlockPlaces, PlainBlockAttention

SIZE, WINDOW = 5, 9


def sees(position: int, other: int, is_own: bool, anchor: int, causal: bool, window: int | None) -> bool:
    near = window is None or other > position - window
    return near and ((not causal or other <= position) if is_own else other < anchor)


@pytest.mark.parametrize("window", [WINDOW, None])
@pytest.mark.parametrize("causal", [True, False])
def test_a_slot_sees_its_context_and_its_own_block_and_nothing_else(causal: bool, window: int | None) -> None:
    config = make_block_case(size=SIZE, causal=causal, window=window).draft.config
    documents = torch.tensor([0] * 16 + [1] * 7)
    positions = torch.cat([torch.arange(16), torch.arange(7)])
    anchors = torch.tensor([(0, 3), (0, 14), (1, 2)])
    places = BlockPlaces(documents, positions, anchors[:, 0].contiguous(), anchors[:, 1].contiguous())
    attend = PlainBlockAttention(config, places)
    heads, kv, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    queries = torch.randn(3 * SIZE, heads, width)
    context = torch.randn(23, kv, width), torch.randn(23, kv, width)
    own = torch.randn(3 * SIZE, kv, width), torch.randn(3 * SIZE, kv, width)
    before = attend(queries, context, own)

    def changed(rows: int | None, slots: int | None) -> list[bool]:
        values = [context[1].clone(), own[1].clone()]
        if rows is not None:
            values[0][rows] += 10
        if slots is not None:
            values[1][slots] += 10
        after = attend(queries, (context[0], values[0]), (own[0], values[1]))
        return ((after - before).abs().amax((1, 2)) > 1e-6).tolist()

    slots = [(b, d, a, a + k) for b, (d, a) in enumerate(anchors.tolist()) for k in range(SIZE)]
    for row in range(23):
        expected = [
            d == documents[row] and sees(p, int(positions[row]), False, a, causal, window)
            for _, d, a, p in slots
        ]
        assert changed(row, None) == expected
    for slot, (block, _, _, position) in enumerate(slots):
        expected = [b == block and sees(p, position, True, a, causal, window) for b, _, a, p in slots]
        assert changed(None, slot) == expected


def test_a_batch_without_blocks_attends_to_nothing() -> None:
    config = make_block_case().draft.config
    none = torch.zeros(0, dtype=torch.long)
    attend = PlainBlockAttention(config, BlockPlaces(torch.zeros(3).long(), torch.arange(3), none, none))
    kv = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    assert attend(torch.randn(0, 4, 8), kv, (kv[0][:0], kv[1][:0])).shape == (0, 4, 8)
