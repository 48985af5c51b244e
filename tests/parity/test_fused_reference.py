"""The fused path computes the loss, the gradients and the metrics of the plain path."""

import copy
from collections.abc import Callable

import pytest
import torch

from eyas.drafters.common.batch import pack_batch
from eyas.drafters.common.loss import LossKind
from eyas.drafters.common.teacher_targets import teacher_targets
from eyas.drafters.eagle3.fused.unroll import FusedUnroll
from eyas.drafters.eagle3.ttt_rows import rows_of
from eyas.drafters.eagle3.unroll import UnrollResult, run_unroll
from train_cases import Case, make_case

CPU = torch.device("cpu")
DECAY = 0.8


def fused(
    case: Case, num_steps: int, loss: LossKind, repeat: int = 1, recompute: bool = False
) -> UnrollResult:
    batch = pack_batch(case.states, rows_of(num_steps), CPU, torch.float32)
    targets = teacher_targets(case.teacher, batch.last, case.target_ids, False, loss != "kl")
    runner = FusedUnroll(case.draft, torch.float32, recompute=recompute)
    runner.weights.start()
    for _ in range(repeat):
        result = runner.run(batch, targets, case.target_ids, DECAY, loss)
    runner.weights.finish()
    return result


def plain(case: Case, num_steps: int, loss: LossKind, recompute: bool = False) -> UnrollResult:
    batch = pack_batch(case.states, rows_of(num_steps), CPU, torch.float32)
    result = run_unroll(case.draft, case.teacher, case.target_ids, batch, DECAY, loss, recompute)
    result.loss.backward()
    return result


@pytest.mark.parametrize("loss", ["kl", "lk", "hybrid"])
@pytest.mark.parametrize(("seed", "num_steps"), [(0, 1), (1, 2), (2, 7), (3, 7)])
def test_fused_loss_gradients_and_metrics_equal_the_plain_ones(
    seed: int, num_steps: int, loss: LossKind
) -> None:
    case = make_case(seed, share=[0.1, 0.5, 0.9, 0.6][seed])
    twin = copy.deepcopy(case.draft)
    expected = plain(case, num_steps, loss)
    wanted = {name: p.grad for name, p in case.draft.trainable().items()}
    case.draft = twin
    found = fused(case, num_steps, loss)
    assert float(found.loss) == pytest.approx(float(expected.loss.detach()), rel=1e-5)
    assert torch.equal(found.accepted, expected.accepted)
    assert torch.equal(found.depth, expected.depth)
    assert torch.allclose(found.step_loss, expected.step_loss, rtol=1e-5)
    for name, parameter in twin.trainable().items():
        assert parameter.grad is not None
        assert (parameter.grad - wanted[name]).norm() <= 1e-5 * wanted[name].norm(), name


@pytest.mark.parametrize(("fc_norm", "norm_output"), [(True, False), (False, True), (True, True)])
def test_fused_eagle_3_1_equals_the_plain_one(fc_norm: bool, norm_output: bool) -> None:
    case = make_case(9, fc_norm=fc_norm, norm_output=norm_output)
    twin = copy.deepcopy(case.draft)
    plain(case, 4, "kl")
    wanted = {name: p.grad for name, p in case.draft.trainable().items()}
    case.draft = twin
    fused(case, 4, "kl")
    for name, parameter in twin.trainable().items():
        assert parameter.grad is not None
        assert (parameter.grad - wanted[name]).norm() <= 1e-5 * wanted[name].norm(), name


@pytest.mark.parametrize(("window", "num_steps"), [(7, 7), (8, 3), (100, 4)])
def test_a_fused_window_equals_the_plain_one(window: int, num_steps: int) -> None:
    case = make_case(window, window=window)
    twin = copy.deepcopy(case.draft)
    expected = plain(case, num_steps, "kl")
    wanted = {name: p.grad for name, p in case.draft.trainable().items()}
    case.draft = twin
    found = fused(case, num_steps, "kl")
    assert float(found.loss) == pytest.approx(float(expected.loss.detach()), rel=1e-5)
    assert torch.equal(found.accepted, expected.accepted)
    for name, parameter in twin.trainable().items():
        assert parameter.grad is not None
        assert (parameter.grad - wanted[name]).norm() <= 1e-5 * wanted[name].norm(), name


@pytest.mark.parametrize("path", [fused, plain])
def test_recomputed_activations_give_the_same_loss_and_gradients(path: Callable[..., UnrollResult]) -> None:
    case = make_case(3)
    twin = copy.deepcopy(case.draft)
    kept = path(case, 5, "kl")
    wanted = {name: p.grad for name, p in case.draft.trainable().items()}
    case.draft = twin
    recomputed = path(case, 5, "kl", recompute=True)
    assert torch.equal(recomputed.loss.detach(), kept.loss.detach())
    assert torch.equal(recomputed.accepted, kept.accepted)
    for name, parameter in twin.trainable().items():
        assert parameter.grad is not None
        assert (parameter.grad - wanted[name]).norm() <= 1e-6 * wanted[name].norm(), name


def test_recomputation_keeps_no_activation_of_the_mlp_and_no_logits() -> None:
    """Counted are the bytes that autograd keeps for the backward pass of the plain path."""
    kept: dict[bool, int] = {}
    for recompute in (False, True):
        case = make_case(3, mlp=256, draft_vocab=60)
        total = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            batch = pack_batch(case.states, rows_of(7), CPU, torch.float32)
            run_unroll(case.draft, case.teacher, case.target_ids, batch, DECAY, "kl", recompute)
        kept[recompute] = total
    assert kept[True] < 0.6 * kept[False]


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_two_batches_add_up(recompute: bool) -> None:
    case = make_case(5)
    once = copy.deepcopy(case.draft)
    fused(case, 4, "kl", repeat=2, recompute=recompute)
    twice = {n: p.grad for n, p in case.draft.trainable().items()}
    case.draft = once
    fused(case, 4, "kl")
    for name, parameter in once.trainable().items():
        assert parameter.grad is not None
        assert (2 * parameter.grad - twice[name]).norm() <= 1e-5 * twice[name].norm(), name
