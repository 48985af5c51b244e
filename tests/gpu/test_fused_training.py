"""The fused path on a GPU: exact in fp32, and in bf16 no further from fp32 than the plain path is."""

import copy
import dataclasses
import warnings
from collections.abc import Iterator

import pytest
import torch

from eyas.config.schema import TrainSettings
from eyas.drafters.common.batch import pack_batch
from eyas.drafters.common.loss import LossKind
from eyas.drafters.common.teacher_targets import teacher_targets
from eyas.drafters.eagle3.fused.unroll import FusedUnroll
from eyas.drafters.eagle3.model import HEADS, TABLES
from eyas.drafters.eagle3.ttt_rows import rows_of
from eyas.drafters.eagle3.unroll import run_unroll
from eyas.train.optim import Stepper, make_optimizers
from train_cases import Case, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
NUM_STEPS = 5


def case_of(seed: int, heads: int = 8, **shape: bool) -> Case:
    return make_case(
        seed,
        (150, 7, 260, 91),
        0.6,
        width=256,
        heads=heads,
        kv_heads=heads // 4,
        head_dim=64,
        mlp=512,
        target_vocab=1500,
        draft_vocab=600,
        **shape,  # type: ignore[arg-type]
    )


def on_gpu(case: Case, dtype: torch.dtype) -> Case:
    draft = copy.deepcopy(case.draft).to(CUDA)
    teacher = case.teacher.to(CUDA, dtype)
    return dataclasses.replace(case, draft=draft, teacher=teacher, target_ids=case.target_ids.to(CUDA))


def fused(
    case: Case, dtype: torch.dtype, loss: LossKind = "kl", recompute: bool = False
) -> tuple[float, dict[str, torch.Tensor]]:
    here = on_gpu(case, dtype)
    batch = pack_batch(case.states, rows_of(NUM_STEPS), CUDA, dtype)
    targets = teacher_targets(here.teacher, batch.last, here.target_ids, False, loss != "kl")
    runner = FusedUnroll(here.draft, dtype, recompute=recompute)
    runner.weights.start()
    result = runner.run(batch, targets, here.target_ids, 0.8, loss)
    runner.weights.finish()
    return float(result.loss), {n: p.grad.cpu() for n, p in here.draft.trainable().items()}


def plain(case: Case, dtype: torch.dtype, loss: LossKind = "kl") -> tuple[float, dict[str, torch.Tensor]]:
    here = on_gpu(case, dtype)
    batch = pack_batch(case.states, rows_of(NUM_STEPS), CUDA, dtype)
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        result = run_unroll(here.draft, here.teacher, here.target_ids, batch, 0.8, loss)
    result.loss.backward()
    return float(result.loss.detach()), {n: p.grad.cpu() for n, p in here.draft.trainable().items()}


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("loss", ["kl", "lk", "hybrid"])
def test_fused_equals_plain_in_fp32(loss: LossKind) -> None:
    # In case 0 one probability of draft and teacher is equal to rounding; min(p, q) has no gradient there.
    case = case_of(1)
    expected_loss, expected = plain(case, torch.float32, loss)
    found_loss, found = fused(case, torch.float32, loss)
    assert found_loss == pytest.approx(expected_loss, rel=1e-5)
    for name in expected:
        assert distance(found[name], expected[name]) < 1e-5, name


@pytest.mark.parametrize("shape", [{"fc_norm": True}, {"norm_output": True}], ids=["fc_norm", "norm_output"])
def test_fused_equals_plain_in_fp32_for_eagle_3_1(shape: dict[str, bool]) -> None:
    case = case_of(0, **shape)
    expected_loss, expected = plain(case, torch.float32)
    found_loss, found = fused(case, torch.float32)
    assert found_loss == pytest.approx(expected_loss, rel=1e-5)
    for name in expected:
        assert distance(found[name], expected[name]) < 1e-5, name


def test_recomputed_activations_give_the_same_gradients() -> None:
    case = case_of(0)
    kept_loss, kept = fused(case, torch.bfloat16)
    loss, found = fused(case, torch.bfloat16, recompute=True)
    assert loss == kept_loss
    for name in kept:
        assert distance(found[name], kept[name]) < 1e-5, name


@pytest.mark.parametrize("loss", ["kl", "lk", "hybrid"])
def test_fused_in_bf16_is_as_close_to_fp32_as_plain_in_bf16(loss: LossKind) -> None:
    case = case_of(1)
    true_loss, truth = plain(case, torch.float32, loss)
    plain_loss, of_plain = plain(case, torch.bfloat16, loss)
    fused_loss, of_fused = fused(case, torch.bfloat16, loss)
    assert abs(fused_loss - true_loss) <= 1.25 * abs(plain_loss - true_loss) + 2e-3 * true_loss
    for name in truth:
        far, near = distance(of_plain[name], truth[name]), distance(of_fused[name], truth[name])
        print(f"{name}: fused {near:.2e}, plain {far:.2e}")
        assert near <= 1.1 * far + 1e-3, name


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says once that this is a prototype, after setting it
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_whole_step_never_waits_for_the_device(request: pytest.FixtureRequest, optimizer: str) -> None:
    here = on_gpu(case_of(2), torch.bfloat16)
    batch = pack_batch(here.states, rows_of(NUM_STEPS), CUDA, torch.bfloat16)
    runner = FusedUnroll(here.draft, torch.bfloat16)
    settings = TrainSettings(optimizer=optimizer)
    adamw, muon = make_optimizers(here.draft.trainable(), settings, HEADS, TABLES)
    stepper = Stepper(adamw, settings, 10, runner.weights.copies, muon)
    for attempt in range(2):
        if attempt:  # kernels are compiled and state is made in the first
            request.getfixturevalue("waiting_is_an_error")
        targets = teacher_targets(here.teacher, batch.last, here.target_ids, False, False)
        runner.weights.start()
        result = runner.run(batch, targets, here.target_ids, 0.8, "kl")
        runner.weights.finish()
        stepper.step(result.loss, torch.full_like(result.loss, batch.num_supervised))


def test_a_loss_that_is_not_finite_takes_no_step() -> None:
    here = on_gpu(case_of(3), torch.bfloat16)
    batch = pack_batch(here.states, rows_of(NUM_STEPS), CUDA, torch.bfloat16)
    runner = FusedUnroll(here.draft, torch.bfloat16)
    settings = TrainSettings(learning_rate=5e-4)
    adamw, muon = make_optimizers(here.draft.trainable(), settings, HEADS, TABLES)
    stepper = Stepper(adamw, settings, 10, runner.weights.copies, muon)
    before = {n: p.detach().clone() for n, p in here.draft.trainable().items()}
    batch.aux[5] = float("nan")
    targets = teacher_targets(here.teacher, batch.last, here.target_ids, False, False)
    runner.weights.start()
    result = runner.run(batch, targets, here.target_ids, 0.8, "kl")
    runner.weights.finish()
    outcome = stepper.step(result.loss, torch.full_like(result.loss, batch.num_supervised))
    assert not outcome.taken
    assert int(stepper.num_taken) == 0
    assert all(torch.equal(p, before[n]) for n, p in here.draft.trainable().items())
