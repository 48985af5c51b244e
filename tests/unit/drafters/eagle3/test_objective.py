"""The sums of an EAGLE-3 draft's loss: packed once a batch, divided last."""

import pytest
import torch

from eyas.drafters.common.batch import pack_batch
from eyas.drafters.eagle3.objective import pack_sums, ratios_of
from eyas.drafters.eagle3.ttt_rows import rows_of
from eyas.drafters.eagle3.unroll import UnrollResult, run_unroll
from train_cases import make_case


def result(loss: float, steps: list[float], accepted: list[int], depth: list[int]) -> UnrollResult:
    return UnrollResult(
        torch.tensor(loss), len(depth), torch.tensor(steps), torch.tensor(accepted), torch.tensor(depth)
    )


def test_sums_of_batches_are_the_sum_of_their_batches() -> None:
    a = pack_sums(result(3.0, [2.0, 1.0], [2, 1, 1, 0], [2, 2, 1, 1]))
    b = pack_sums(result(1.0, [1.0, 0.0], [0], [1]))
    assert a.tolist() == [3.0, 2.0, 1.0, 3, 1, 4, 2, 4]
    assert (a + b).tolist() == [4.0, 3.0, 1.0, 3, 1, 5, 2, 5]
    assert ratios_of((a + b).tolist()) == {"loss": 4.0 / 5, "agreement": [3 / 5, 1 / 2]}


def test_sums_of_documents_are_those_of_the_batch_that_packs_them() -> None:
    case, cpu = make_case(2), torch.device("cpu")

    def sums(states: list) -> torch.Tensor:
        batch = pack_batch(states, rows_of(4), cpu, torch.float32)
        return pack_sums(run_unroll(case.draft, case.teacher, case.target_ids, batch, 0.8))

    together, apart = sums(case.states), sum(sums([one]) for one in case.states)
    assert together.tolist() == pytest.approx(apart.tolist(), rel=1e-5)
