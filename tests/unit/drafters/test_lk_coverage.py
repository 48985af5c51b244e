"""Acceptance losses count the probability that the target gives the draft vocabulary."""

import pytest
import torch

from eyas.drafters.common.loss import row_losses
from eyas.drafters.common.teacher_targets import teacher_targets
from eyas.targets.teacher import TeacherHead

COUNTS = torch.ones(1, dtype=torch.bool)


def teacher() -> TeacherHead:
    torch.manual_seed(0)
    head = torch.randn(12, 8)
    return TeacherHead(torch.ones(8), head, head, "rms", 1e-6, None, 1.0)


@pytest.mark.parametrize("ids", [[0, 3, 4, 9], list(range(12))])
def test_coverage_is_the_targets_probability_of_the_draft_vocabulary(ids: list[int]) -> None:
    last, target_ids = torch.randn(5, 8), torch.tensor(ids)
    head = teacher()
    targets = teacher_targets(head, last, target_ids, len(ids) == 12, with_coverage=True)
    expected = torch.softmax(head.logits(last), -1)[:, ids].sum(-1)
    if len(ids) == 12:
        assert targets.coverage is None  # the whole vocabulary
    else:
        assert targets.coverage is not None
        torch.testing.assert_close(targets.coverage, expected)
        torch.testing.assert_close(
            targets.probabilities * targets.coverage[:, None], torch.softmax(head.logits(last), -1)[:, ids]
        )


def test_a_row_with_a_quarter_of_the_mass_has_a_quarter_of_the_acceptance() -> None:
    """The draft equals the renormalized teacher, so it is accepted as often as the target stays inside."""
    p = torch.tensor([[0.5, 0.3, 0.2]])
    loss = row_losses(p.log(), p, COUNTS, torch.tensor([0.26]), "lk")
    torch.testing.assert_close(loss, -torch.tensor([0.26]).log())
    assert float(row_losses(p.log(), p, COUNTS, None, "lk")) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kind", ["lk", "hybrid"])
def test_the_gradient_is_that_of_the_true_overlap(kind: str) -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, 6, dtype=torch.float64, requires_grad=True)
    p, coverage = torch.softmax(torch.randn(1, 6, dtype=torch.float64), -1), torch.tensor([0.4])
    (found,) = torch.autograd.grad(row_losses(logits, p, COUNTS, coverage, kind).sum(), logits)  # type: ignore[arg-type]
    q = torch.softmax(logits, -1)
    overlap = torch.minimum(0.4 * p, q).sum()
    if kind == "lk":
        expected = -overlap.log()
    else:
        share = torch.exp(-3.0 * overlap.detach())
        expected = share * (p * (p / q).log()).sum() + (1 - share) * (1 - overlap)
    (wanted,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_kl_reads_no_coverage() -> None:
    p, logits = torch.tensor([[0.5, 0.3, 0.2]]), torch.randn(1, 3)
    losses = [row_losses(logits, p, COUNTS, c, "kl") for c in (None, torch.tensor([0.1]))]
    assert torch.equal(*losses)
