"""The losses are what their papers define, value and gradient: compared with a slow float64 reference."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from eyas.drafters.common.loss import LossKind, row_losses
from slow_reference import Floats, row_gradient, row_loss

KINDS: tuple[LossKind, ...] = ("kl", "lk", "hybrid")
WIDTH = 13


ALL = torch.ones(6, dtype=torch.bool)
COVERAGES = [None, torch.tensor([1.0, 0.9, 0.5, 0.26, 0.1, 0.99])]


def each_row(
    logits: torch.Tensor, p: torch.Tensor, coverage: torch.Tensor | None
) -> Iterator[tuple[Floats, Floats, float]]:
    shares = [1.0] * len(logits) if coverage is None else coverage.tolist()
    yield from zip(logits.double().numpy(), p.double().numpy(), shares, strict=True)


def references(
    logits: torch.Tensor, p: torch.Tensor, kind: LossKind, coverage: torch.Tensor | None = None
) -> list[float]:
    return [row_loss(x, y, kind, share) for x, y, share in each_row(logits, p, coverage)]


def make_rows(spread: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and probabilities [6, WIDTH]; the larger the spread, the less they overlap."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(6, WIDTH)) * spread).float()
    p = torch.softmax(torch.from_numpy(rng.normal(size=(6, WIDTH)) * spread), -1).float()
    return logits, p


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("coverage", COVERAGES, ids=["all ids", "some ids"])
def test_the_loss_of_a_row_is_its_definition(
    kind: LossKind, spread: float, coverage: torch.Tensor | None
) -> None:
    logits, p = make_rows(spread)
    found = row_losses(logits, p, ALL, coverage, kind)
    expected = references(logits, p, kind, coverage)
    assert found.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert len({round(x, 4) for x in expected}) > 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("coverage", COVERAGES, ids=["all ids", "some ids"])
def test_the_gradient_of_a_row_is_the_measured_one(
    kind: LossKind, spread: float, coverage: torch.Tensor | None
) -> None:
    """The weight of the hybrid loss is a constant: no gradient goes through it."""
    logits, p = make_rows(spread, seed=1)
    leaf = logits.clone().requires_grad_(True)
    row_losses(leaf, p, ALL, coverage, kind).sum().backward()
    assert leaf.grad is not None
    for found, (x, y, share) in zip(leaf.grad.numpy(), each_row(logits, p, coverage), strict=True):
        np.testing.assert_allclose(found, row_gradient(x, y, kind, share), rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_does_not_count_has_neither_loss_nor_gradient(kind: LossKind) -> None:
    logits, p = make_rows(1.0)
    counts = torch.tensor([True, False, True, False, False, True])
    leaf = logits.clone().requires_grad_(True)
    losses = row_losses(leaf, p, counts, None, kind)
    losses.sum().backward()
    assert leaf.grad is not None
    assert losses[~counts].tolist() == [0, 0, 0]
    assert (losses[counts] > 0).all()
    assert not leaf.grad[~counts].any()
    assert leaf.grad[counts].any(1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_is_the_teacher_has_no_loss(kind: LossKind) -> None:
    logits, _ = make_rows(1.0)
    losses = row_losses(logits, torch.softmax(logits, -1), ALL, None, kind)
    # The hybrid loss keeps exp(-3) of a KL that is zero.
    assert losses.tolist() == pytest.approx([0] * 6, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_of_one_token_gives_a_finite_loss(kind: LossKind) -> None:
    logits = torch.zeros(1, WIDTH)
    p = torch.zeros(1, WIDTH)
    p[0, 3] = 1
    (found,) = row_losses(logits, p, ALL[:1], None, kind).tolist()
    assert found == pytest.approx(row_loss(np.zeros(WIDTH), p[0].double().numpy(), kind), rel=1e-5)


def test_rows_that_do_not_overlap_at_all_have_the_largest_finite_loss() -> None:
    logits = torch.tensor([[200.0, 0.0]])
    found = row_losses(logits, torch.tensor([[0.0, 1.0]]), ALL[:1], None, "lk")
    assert found.tolist() == pytest.approx([-np.log(1e-6)], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_16_bit_logits_are_computed_in_32_bits(kind: LossKind, dtype: torch.dtype) -> None:
    logits, p = (x.to(dtype) for x in make_rows(2.0))
    found = row_losses(logits, p, ALL, None, kind)
    exact = references(logits, p, kind)
    assert found.dtype == torch.float32
    # What rounding the teacher's probabilities does to their sum is in both.
    assert found.tolist() == pytest.approx(exact, rel=1e-3, abs=1e-4)
