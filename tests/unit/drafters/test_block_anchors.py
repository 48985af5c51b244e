import numpy as np
import pytest
import torch

from block_reference import depth_of
from eyas.drafters.common.block.anchors import BlockPlan, num_blocks, plan_blocks, run_lengths
from tiny import random_samples


def plan_of(
    supervised: list[int], documents: list[int], predictions: int = 4, anchors: int = 100, draw: int = 0
) -> BlockPlan:
    return plan_blocks(torch.tensor(supervised).bool(), torch.tensor(documents), predictions, anchors, draw)


def test_anchors_are_the_supervised_positions_that_have_something_before_them() -> None:
    plan = plan_of([0, 1, 1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 1])
    # Position 5 is the first token of its document.
    assert plan.anchors.tolist() == [1, 2, 4, 6, 7]
    assert plan.teachers.tolist() == [0, 1, 2, 4, 5]


def test_the_first_token_of_the_only_document_is_no_anchor() -> None:
    assert plan_of([1, 1, 1], [0, 0, 0]).anchors.tolist() == [1, 2]


def test_supervision_ends_at_the_first_gap_at_the_documents_end_and_at_the_blocks() -> None:
    plan = plan_of([0, 1, 1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 1])
    assert plan.depths.tolist() == [2, 1, 1, 2, 1]
    assert plan_of([0, 1, 1, 1, 1, 1], [0] * 6, predictions=3).depths.tolist() == [3, 3, 3, 2, 1]
    assert plan.num_supervised == 7
    assert plan.spans.tolist() == [[0, 2], [1, 2], [2, 3], [4, 6], [5, 6]]


@pytest.mark.parametrize("seed", range(4))
def test_depths_are_what_the_loss_masks_say_token_by_token(seed: int) -> None:
    samples = random_samples(7, 50, seed)
    supervised = torch.from_numpy(np.concatenate([s.supervised for s in samples]))
    lengths = torch.tensor([len(s) for s in samples])
    documents = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    plan = plan_blocks(supervised, documents, 5, 1000, seed)
    starts = (torch.cumsum(lengths, 0) - lengths).tolist()
    expected = [
        (start + t, depth)
        for sample, start in zip(samples, starts, strict=True)
        for t in range(1, len(sample))
        if (depth := depth_of(sample, t, 5))
    ]
    assert list(zip(plan.anchors.tolist(), plan.depths.tolist(), strict=True)) == expected


def test_each_document_gives_so_many_anchors_drawn_without_replacement_by_the_seed() -> None:
    supervised, documents = [0] + [1] * 29 + [0] + [1] * 3, [0] * 30 + [1] * 4
    plans = [plan_of(supervised, documents, anchors=6, draw=draw) for draw in (1, 1, 2)]
    for plan in plans:
        of_first = [a for a in plan.anchors.tolist() if a < 30]
        assert len(of_first) == len(set(of_first)) == 6
        assert of_first == sorted(of_first)
        assert [a for a in plan.anchors.tolist() if a >= 30] == [31, 32, 33]
    assert plans[0].anchors.tolist() == plans[1].anchors.tolist() != plans[2].anchors.tolist()


def test_every_position_is_drawn_about_as_often() -> None:
    counts = np.zeros(20)
    for draw in range(400):
        counts[plan_of([0] + [1] * 19, [0] * 20, anchors=5, draw=draw).anchors.numpy()] += 1
    assert counts[0] == 0
    assert counts[1:].min() > 0.7 * 400 * 5 / 19
    assert counts[1:].max() < 1.3 * 400 * 5 / 19


def test_a_batch_without_a_supervised_row_has_no_blocks() -> None:
    plan = plan_of([0, 0, 0], [0, 0, 0])
    assert plan.num_supervised == 0
    assert len(plan.anchors) == len(plan.spans) == 0
    assert plan.of_rounds(4).num_supervised == 0


def test_rounds_start_wherever_serving_could_whatever_was_drawn() -> None:
    supervised, documents = [0] + [1] * 29 + [0] + [1] * 3, [0] * 30 + [1] * 4
    rounds = plan_of(supervised, documents, anchors=2).of_rounds(4)
    everything = plan_of(supervised, documents)
    assert rounds.anchors.tolist() == everything.anchors.tolist()
    assert rounds.depths.tolist() == everything.depths.tolist()


def test_a_part_keeps_its_blocks_and_counts_them() -> None:
    plan = plan_of([0, 1, 1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 1])
    part = plan.part(slice(1, 4))
    assert part.anchors.tolist() == [2, 4, 6]
    assert part.num_supervised == 4
    moved = plan.each(lambda t: t + 0)
    assert moved.num_supervised == plan.num_supervised
    assert [t.tolist() for t in moved.tensors()] == [t.tolist() for t in plan.tensors()]


def test_runs_count_what_follows_without_a_gap() -> None:
    assert run_lengths(np.array([1, 2, 4, 5, 6, 7]), np.array([0, 0, 0, 1, 1, 1])).tolist() == [
        2,
        1,
        1,
        3,
        2,
        1,
    ]
    assert run_lengths(np.array([], dtype=int), np.array([], dtype=int)).tolist() == []


def test_blocks_of_a_sample_are_counted_as_they_are_drawn() -> None:
    supervised = np.array([1, 1, 1, 0, 1], dtype=bool)
    assert num_blocks(supervised, 100) == 3
    assert num_blocks(supervised, 2) == 2
