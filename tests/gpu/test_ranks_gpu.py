"""Two GPUs train what one process on a CPU trains: NCCL, and sums that run beside the backward."""

from pathlib import Path

import pytest
import torch

from eyas.train.ranks import Ranks
from rank_cases import run_ranks, train_together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_two_gpus_train_what_one_cpu_process_trains(tmp_path: Path) -> None:
    alone = train_together(Ranks(), tmp_path / "alone", False, None)
    arguments = (tmp_path / "together", False, None, (), "cuda")
    one, two = run_ranks(2, tmp_path / "meet", train_together, *arguments, backend="nccl")
    assert all(torch.equal(one["weights"][n], two["weights"][n]) for n in one["weights"])
    for row, expected in zip(one["history"], alone["history"], strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert row.get("grad_norm", 0) == pytest.approx(expected.get("grad_norm", 0), rel=1e-2)
