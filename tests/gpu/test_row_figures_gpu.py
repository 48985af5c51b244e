"""Rows measured in a GPU's memory have the figures that they have in the host's."""

import pytest
import torch

from eyas.row_stats import HIGH, LOW, NORM, measure_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(512, 4, 4096), (7, 3, 7168), (1, 1, 576)])
def test_figures_are_those_of_the_host(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    states = (30 * torch.randn(shape)).to(dtype)
    here, there = measure_rows(states), measure_rows(states.cuda())
    assert there.is_contiguous()
    there = there.cpu()
    for exact in (LOW, HIGH):
        assert torch.equal(there[..., exact], here[..., exact])
    torch.testing.assert_close(there[..., NORM], here[..., NORM], rtol=1e-5, atol=0)
    torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-4 * float(here[..., NORM].max()))


def test_equal_rows_have_equal_figures_and_nan_shows() -> None:
    states = torch.randn(1, 1, 4096, device="cuda").bfloat16().expand(100, 3, 4096).clone()
    figures = measure_rows(states)
    assert (figures == figures[0, 0]).all()
    states[1, 2, 7] = float("nan")
    assert measure_rows(states)[1, 2].isnan().all()
