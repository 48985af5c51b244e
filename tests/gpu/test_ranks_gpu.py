"""Two GPUs train what one process on a CPU trains: NCCL, and sums that run beside the backward."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.train.ranks import Ranks
from rank_cases import run_ranks, train_together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def train(ranks: Ranks, root: Path, shard: bool) -> dict[str, Any]:
    return train_together(ranks, root, False, None, device="cuda", shard=shard, compute_dtype="float32")


@pytest.mark.parametrize("shard", [False, True], ids=["whole", "sliced"])
def test_two_gpus_train_what_one_cpu_process_trains(tmp_path: Path, shard: bool) -> None:
    alone = train_together(Ranks(), tmp_path / "alone", False, None)
    one, two = run_ranks(2, tmp_path / "meet", train, tmp_path / "together", shard, backend="nccl")
    assert one["bytes"] < (0.52 if shard else 1.01) * alone["bytes"]
    assert all(torch.equal(one["weights"][n], two["weights"][n]) for n in one["weights"])
    for row, expected in zip(one["history"], alone["history"], strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert row.get("grad_norm", 0) == pytest.approx(expected.get("grad_norm", 0), rel=1e-2)
