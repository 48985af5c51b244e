import pytest
import torch

from block_cases import make_block_case
from eyas.drafters.dspark.objective import ConfidenceLoss, calibration_sums


def test_a_confidence_that_is_the_overlap_has_no_calibration_error() -> None:
    overlap = torch.rand(40, 7)
    sums = calibration_sums(overlap, overlap, torch.ones(40, 7).bool())
    found = ConfidenceLoss(1.0, 4.0).ratios(sums.tolist())
    assert found["confidence"] == pytest.approx(float(overlap.mean()), rel=1e-6)
    assert found["confidence_error"] == pytest.approx(0.0, abs=1e-9)


def test_the_calibration_error_is_the_mean_gap_of_bins_by_their_counts() -> None:
    confidence = torch.tensor([[0.95, 0.95, 0.15, 1.0]])
    overlap = torch.tensor([[0.75, 0.85, 0.35, 0.0]])
    is_judged = torch.tensor([[True, True, True, False]])
    found = ConfidenceLoss(1.0, 4.0).ratios(calibration_sums(confidence, overlap, is_judged).tolist())
    assert found["confidence_error"] == pytest.approx((0.3 + 0.2) / 3, rel=1e-6)
    assert found["overlap"] == pytest.approx((0.75 + 0.85 + 0.35) / 3, rel=1e-6)


def test_ratios_hold_the_confidence_next_to_loss_and_agreement() -> None:
    case = make_block_case("dspark")
    objective = case.objective()
    ratios = objective.ratios(objective.measure(case.batch, 3)[0].tolist())
    assert ratios.keys() == {
        "loss", "agreement", "cross_entropy", "confidence", "overlap", "confidence_error",
    }  # fmt: skip
    assert 0 <= ratios["confidence_error"] <= 1
    assert len(ratios["agreement"]) == 5


def test_the_confidence_does_not_move_what_it_is_held_to() -> None:
    # Its target is detached: without its own loss, the head's parameters alone have no gradient.
    case = make_block_case("dspark")
    objective = case.objective()
    objective.further = ConfidenceLoss(0.0, 4.0)
    objective.backward(case.batch)
    head = case.draft.confidence_head.proj
    assert head.weight.grad is not None
    assert not head.weight.grad.any()
