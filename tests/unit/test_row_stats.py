"""Figures of rows are those of float64, whatever the type and the size of a block."""

import pytest
import torch

from eyas import row_stats
from eyas.row_stats import measure_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_figures_are_those_of_float64(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_stats, "_BLOCK", block)
    states = (100 * torch.randn(7, 3, 33)).to(dtype)
    exact = states.double()
    expected = torch.stack([exact.amin(-1), exact.amax(-1), exact.sum(-1), exact.norm(dim=-1)], dim=-1)
    found = measure_rows(states)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-3)


def test_equal_rows_have_equal_figures_and_a_value_that_is_not_finite_shows() -> None:
    states = torch.randn(1, 1, 40).expand(5, 3, 40).clone()
    figures = measure_rows(states)
    assert (figures == figures[0, 0]).all()
    states[1, 2, 7], states[2, 0, 3] = float("nan"), float("-inf")
    figures = measure_rows(states)
    assert figures[1, 2].isnan().all()
    assert figures[2, 0].tolist() == [float("-inf"), pytest.approx(3, abs=3), float("-inf"), float("inf")]
    assert figures.isfinite().all(-1).sum() == 13


def test_no_rows_and_both_modes() -> None:
    assert measure_rows(torch.empty(0, 3, 8)).shape == (0, 3, 4)
    with torch.inference_mode():
        measure_rows(torch.randn(2, 1, 1 << 10))
    measure_rows(torch.randn(2, 1, 1 << 10))  # in the same memory
