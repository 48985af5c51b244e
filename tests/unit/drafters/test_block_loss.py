import math

import pytest
import torch

from eyas.drafters.common.block.loss import (
    BlockTargets,
    LossMix,
    block_losses,
    dpace_weights,
    fixed_weights,
)


def targets(label: list[list[int]], judged: list[list[int]], **more: torch.Tensor) -> BlockTargets:
    is_judged = torch.tensor(judged).bool()
    return BlockTargets(torch.tensor(label), is_judged, is_judged, **more)


def test_dpace_weighs_a_prediction_by_the_products_that_it_is_part_of() -> None:
    ce = torch.tensor([[0.1, 0.7, 2.0]])
    s = [0.5 * math.exp(-c) + 0.5 for c in ce[0].tolist()]
    products = [s[0], s[0] * s[1], s[0] * s[1] * s[2]]
    found = dpace_weights(ce, targets([[0, 0, 0]], [[1, 1, 1]]), 0.5)
    torch.testing.assert_close(found, torch.tensor([[sum(products), sum(products[1:]), products[2]]]))


def test_dpace_counts_what_is_not_supervised_as_one_in_products_and_zero_in_sums() -> None:
    ce = torch.tensor([[0.1, 0.7, 2.0, 9.0]])
    whole = dpace_weights(ce[:, :2], targets([[0, 0]], [[1, 1]]), 0.5)
    found = dpace_weights(ce, targets([[0] * 4], [[1, 1, 0, 0]]), 0.5)
    torch.testing.assert_close(found[:, :2], whole)
    assert found[0, 2:].tolist() == [0.0, 0.0]


def test_dpace_without_certainty_weighs_by_depth_alone() -> None:
    # alpha near 1: every s is 1, so prediction j weighs the number of predictions from it on.
    found = dpace_weights(torch.full((1, 4), 30.0), targets([[0] * 4], [[1] * 4]), 1 - 1e-7)
    torch.testing.assert_close(found, torch.tensor([[4.0, 3.0, 2.0, 1.0]]))


def test_a_label_outside_the_draft_vocabulary_cannot_be_right() -> None:
    known = BlockTargets(torch.tensor([[0, 0]]), torch.tensor([[True, True]]), torch.tensor([[True, False]]))
    found = dpace_weights(torch.zeros(1, 2), known, 0.5)
    torch.testing.assert_close(found, torch.tensor([[1.5, 0.5]]))


def test_fixed_weights_fall_by_the_same_factor() -> None:
    torch.testing.assert_close(
        fixed_weights(3, 4.0, torch.device("cpu")), torch.tensor([0.0, -0.25, -0.5]).exp()
    )


def test_a_draft_that_is_the_target_has_no_distance_and_overlaps_wholly() -> None:
    logits = torch.randn(2, 3, 11)
    same = targets(
        logits.argmax(-1).tolist(),
        [[1, 1, 1], [1, 0, 0]],
        probabilities=logits.softmax(-1),
        mass=torch.ones(2, 3),
    )
    losses = block_losses(logits, same, LossMix(kl=1.0, l1=1.0))
    assert float(losses.loss) == pytest.approx(0, abs=1e-5)
    torch.testing.assert_close(losses.overlap, torch.ones(2, 3))
    assert losses.best.tolist() == same.label.tolist()


def test_the_overlap_is_the_chance_that_speculative_sampling_accepts() -> None:
    logits = torch.tensor([[[0.0, 0.0]]])
    half = targets([[0]], [[1]], probabilities=torch.tensor([[[0.9, 0.1]]]), mass=torch.tensor([[0.5]]))
    # min(0.45, 0.5) + min(0.05, 0.5): the target gives the draft's vocabulary half of its mass.
    torch.testing.assert_close(block_losses(logits, half, LossMix(l1=1.0)).overlap, torch.tensor([[0.5]]))


def test_l1_is_twice_one_less_the_overlap_on_the_whole_vocabulary() -> None:
    logits, p = torch.randn(4, 3, 17), torch.randn(4, 3, 17).softmax(-1)
    all_of = targets([[0] * 3] * 4, [[1] * 3] * 4, probabilities=p, mass=torch.ones(4, 3))
    losses = block_losses(logits, all_of, LossMix(l1=1.0, gamma=1e9))
    assert float(losses.loss) == pytest.approx(2 * float((1 - losses.overlap).sum()), rel=1e-5)


def test_predictions_that_are_not_supervised_carry_no_loss_and_no_gradient() -> None:
    logits = torch.randn(2, 3, 11, requires_grad=True)
    some = targets([[1, 2, 3], [4, 5, 6]], [[1, 1, 0], [1, 0, 0]])
    for mix in (LossMix(ce=1.0), LossMix(ce=1.0, dpace_alpha=0.5)):
        (gradient,) = torch.autograd.grad(block_losses(logits, some, mix).loss, logits)
        assert ((gradient != 0).any(-1) == some.is_judged).all()
