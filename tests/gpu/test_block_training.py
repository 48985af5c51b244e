"""The fast path of block drafts on a GPU: exact in fp32, and in bf16 near the plain path in fp32."""

import copy
import dataclasses
from typing import Any

import pytest
import torch

from block_cases import BlockCase, make_block_case
from eyas.config.schema import TrainSettings
from eyas.drafters.common.block.fast import FastBlockObjective
from eyas.drafters.common.block.judge import BlockJudge
from eyas.drafters.common.block.objective import BlockObjective
from eyas.train.optim import Stepper, make_optimizers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"name": "dflash", "size": 16, "window": 100},
    "dflash, kl, bidirectional": {"name": "dflash", "loss": "kl", "size": 8, "causal": False, "window": None},
    "dflash, part of the vocabulary": {"name": "dflash", "size": 16, "window": 64, "draft_vocab": 600},
    "dspark": {"name": "dspark", "size": 7, "window": 100},
    "dspark, part of the vocabulary": {"name": "dspark", "size": 7, "window": None, "draft_vocab": 600},
}


def case_of(settings: dict[str, Any]) -> BlockCase:
    shape: dict[str, Any] = {
        "width": 256, "heads": 8, "kv_heads": 2, "head_dim": 64, "mlp": 512, "target_vocab": 1500,
        "draft_vocab": 1500, "num_anchors": 40, "rank": 64,
    }  # fmt: skip
    return make_block_case(lengths=(150, 7, 260, 91), **(shape | settings))


def objective_on_gpu(case: BlockCase, path: type[BlockObjective], dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the objective, and the draft that holds the masters."""
    draft = copy.deepcopy(case.draft).to(CUDA)
    judge = BlockJudge(case.teacher.to(CUDA, dtype), case.target_ids.to(CUDA))
    return path(draft, judge, case.mix, dtype, CUDA, case.further), draft


def batch_on_gpu(case: BlockCase, dtype: torch.dtype) -> Any:
    batch = case.batch
    states = dataclasses.replace(batch, aux=batch.aux.to(dtype), last=batch.last.to(dtype))
    return states.to(CUDA)


def gradients(draft: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.float() for name, p in draft.trainable().items()}


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_loss_and_gradients_in_fp32_are_those_of_the_plain_path(settings: dict[str, Any]) -> None:
    case = case_of(settings)
    plain, of_plain = objective_on_gpu(case, BlockObjective, torch.float32)
    fast, of_fast = objective_on_gpu(case, FastBlockObjective, torch.float32)
    batch = batch_on_gpu(case, torch.float32)
    expected, found = plain.backward(batch), fast.backward(batch)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-2)
    wanted = gradients(of_plain)
    for name, gradient in gradients(of_fast).items():
        assert distance(gradient, wanted[name]) < 2e-3, name


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_loss_and_gradients_in_bf16_are_near_those_in_fp32(settings: dict[str, Any]) -> None:
    case = case_of(settings)
    exact, of_exact = objective_on_gpu(case, BlockObjective, torch.float32)
    plain, of_plain = objective_on_gpu(case, BlockObjective, torch.bfloat16)
    fast, of_fast = objective_on_gpu(case, FastBlockObjective, torch.bfloat16)
    truth = exact.backward(batch_on_gpu(case, torch.float32))
    plain.backward(batch_on_gpu(case, torch.bfloat16))
    sums = fast.backward(batch_on_gpu(case, torch.bfloat16))
    assert float(sums[0]) == pytest.approx(float(truth[0]), rel=2e-2)
    wanted, others = gradients(of_exact), gradients(of_plain)
    for name, gradient in gradients(of_fast).items():
        allowed = max(2 * distance(others[name], wanted[name]), 5e-2)
        assert distance(gradient, wanted[name]) < allowed, name


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_rounds_are_those_of_the_plain_path(settings: dict[str, Any]) -> None:
    case = case_of(settings)
    plain, _ = objective_on_gpu(case, BlockObjective, torch.float32)
    fast, _ = objective_on_gpu(case, FastBlockObjective, torch.float32)
    batch = batch_on_gpu(case, torch.float32)
    expected, found = plain.measure(batch, 3)[1], fast.measure(batch, 3)[1]
    assert torch.equal(found.rows, expected.rows)
    assert torch.equal(found.depth, expected.depth)
    assert (found.accepted != expected.accepted).float().mean() < 0.01


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_optimizers_step_masters_and_copies_alike(name: str, optimizer: Any) -> None:
    from eyas import registry

    case = case_of({"name": name, "size": 8, "window": 64})
    fast, draft = objective_on_gpu(case, FastBlockObjective, torch.bfloat16)
    batch = batch_on_gpu(case, torch.bfloat16)
    settings = TrainSettings(optimizer=optimizer, learning_rate=2e-3, warmup_share=0.0)
    drafter = registry.drafter(name)
    adamw, muon = make_optimizers(draft.trainable(), settings, drafter.heads, drafter.tables)
    stepper = Stepper(adamw, settings, 40, fast.copies, muon)
    losses = []
    for _ in range(30):
        fast.start()
        fast.expect_last()
        sums = fast.backward(batch)
        fast.finish()
        stepper.step(sums[0], sums[-1])
        losses.append(float(sums[0] / sums[-1]))
    assert losses[-1] < 0.8 * losses[0]
    for master, of_compute in fast.copies.items():
        torch.testing.assert_close(of_compute, master.to(torch.bfloat16), rtol=0, atol=0)


def test_batches_of_other_sizes_take_the_same_kernels() -> None:
    for seed, lengths in enumerate([(150, 40), (33, 300, 12), (512,)]):
        case = make_block_case(
            "dflash", seed, lengths, size=16, window=100, width=256, heads=8, kv_heads=2, head_dim=64,
            mlp=512, target_vocab=1500, draft_vocab=1500,
        )  # fmt: skip
        plain, _ = objective_on_gpu(case, BlockObjective, torch.float32)
        fast, _ = objective_on_gpu(case, FastBlockObjective, torch.float32)
        batch = batch_on_gpu(case, torch.float32)
        torch.testing.assert_close(fast.backward(batch), plain.backward(batch), rtol=1e-3, atol=1e-2)
