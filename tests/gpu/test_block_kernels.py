"""The kernels of block drafts compute what the plain path does; TRITON_INTERPRET=1 runs them on a CPU."""

import os

import pytest
import torch

from block_cases import DSPARK_LOSS, make_block_case
from eyas.drafters.common.block.attention import BlockPlaces, PlainBlockAttention
from eyas.drafters.common.block.chunked_loss import losses_and_gradient
from eyas.drafters.common.block.fast import FastBlockObjective
from eyas.drafters.common.block.judge import BlockJudge
from eyas.drafters.common.block.loss import LossMix

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() or INTERPRETED),
        reason="needs a CUDA device (or TRITON_INTERPRET=1 and triton)",
    ),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
MIXES = {
    "ce": LossMix(ce=1.0, gamma=4.0),
    "d-pace": LossMix(ce=1.0, dpace_alpha=0.5),
    "kl": LossMix(kl=1.0, gamma=7.0),
    "dspark": DSPARK_LOSS,
    "all": LossMix(ce=0.3, kl=0.5, l1=0.2, gamma=2.0),
}


@pytest.mark.parametrize("draft_vocab", [61, 23])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_losses_and_gradient_are_the_plain_ones(mix: LossMix, scale: float, draft_vocab: int) -> None:
    from eyas.drafters.common.block.fused_loss import fused_losses_

    case = make_block_case("dspark", draft_vocab=draft_vocab)
    judge = BlockJudge(case.teacher.to(DEVICE, torch.float32), case.target_ids.to(DEVICE))
    batch = case.batch.to(torch.device(DEVICE))
    predictions = case.draft.config.num_predictions
    for here in (slice(0, 5), slice(5, None)):
        plan = batch.plan.part(here)
        torch.manual_seed(0)
        logits = 3 * torch.randn(len(plan.spans), predictions, draft_vocab, device=DEVICE)
        wanted = judge.targets(batch.last, plan, predictions, with_distribution=True)
        expected, gradient = losses_and_gradient(logits.clone(), scale, wanted, mix)
        losses, targets, found = fused_losses_(logits, scale, judge, batch.last, plan, mix, True)
        assert found is logits
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(losses.loss, expected.loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(losses.ce, expected.ce, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(losses.overlap, expected.overlap, rtol=1e-5, atol=1e-6)
        assert torch.equal(losses.best, expected.best)
        for name in ("label", "is_judged", "is_labeled"):
            assert torch.equal(getattr(targets, name), getattr(wanted, name))


def test_without_a_distribution_only_labels_are_held_to() -> None:
    from eyas.drafters.common.block.fused_loss import fused_losses_

    case = make_block_case("dflash")
    judge = BlockJudge(case.teacher.to(DEVICE, torch.float32), case.target_ids.to(DEVICE))
    batch, mix = case.batch.to(torch.device(DEVICE)), MIXES["d-pace"]
    predictions = case.draft.config.num_predictions
    torch.manual_seed(0)
    logits = torch.randn(len(batch.plan.spans), predictions, 61, device=DEVICE)
    wanted = judge.targets(batch.last, batch.plan, predictions, with_distribution=False)
    expected, gradient = losses_and_gradient(logits.clone(), 1.0, wanted, mix)
    losses, _, found = fused_losses_(logits, 1.0, judge, batch.last, batch.plan, mix, False)
    torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses.loss, expected.loss, rtol=1e-5, atol=1e-5)
    assert losses.overlap.isnan().all()


def test_the_first_of_several_equal_logits_is_the_best() -> None:
    from eyas.drafters.common.block.loss_kernel import log_sum_exp

    logits = torch.zeros(3, 9000, device=DEVICE)
    logits[0, [8999, 77, 5000]] = 2.0
    logits[1, [4097, 1]] = 2.0
    lse, best = log_sum_exp(logits, 0.5)
    assert best.tolist() == [77, 1, 0]
    torch.testing.assert_close(lse, torch.logsumexp(logits * 0.5, -1))


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_layers_and_their_gradients_are_the_plain_ones(name: str) -> None:
    from eyas.drafters.common.block.fused_layers import fused_blocks, fused_context

    case = make_block_case(name, head_dim=12, heads=6, kv_heads=3, width=36)
    batch, plan = case.batch.to(torch.device(DEVICE)), case.plan.each(lambda tensor: tensor.to(DEVICE))
    draft = case.draft.to(DEVICE)
    positions = batch.positions[plan.anchors]
    places = BlockPlaces(batch.documents, batch.positions, batch.documents[plan.anchors], positions)
    attend = PlainBlockAttention(draft.config, places)
    found: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
    for is_fused in (False, True):
        if is_fused:
            context = fused_context(draft, batch.aux, batch.positions)
            normed = fused_blocks(draft, batch.tokens[plan.anchors], positions, context, attend)
        else:
            context = draft.context(batch.aux, batch.positions)
            normed = draft(batch.tokens[plan.anchors], positions, context, attend)
        torch.manual_seed(0)
        normed.backward(torch.randn(normed.shape).to(DEVICE))
        touched = {n: p.grad for n, p in draft.trainable().items() if p.grad is not None}
        found.append((normed.detach(), touched))
        draft.zero_grad(set_to_none=True)
    (expected, wanted), (normed, gradients) = found
    torch.testing.assert_close(normed, expected, rtol=1e-4, atol=1e-5)
    assert gradients.keys() == wanted.keys()
    for parameter, gradient in gradients.items():
        distance = (gradient - wanted[parameter]).norm() / wanted[parameter].norm()
        assert distance < 1e-5, parameter


@pytest.mark.skipif(not INTERPRETED, reason="test_block_training.py runs the whole path on a GPU")
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_the_path_of_kernels_gives_the_plain_sums_and_gradients(name: str) -> None:
    case, other = (make_block_case(name, lengths=(9, 14), num_layers=1, num_anchors=3) for _ in range(2))
    plain = case.objective()
    fast = other.objective(FastBlockObjective, make_attend=PlainBlockAttention, chunk_rows=8)
    fast.uses_kernels = True
    torch.testing.assert_close(fast.backward(other.batch), plain.backward(case.batch), rtol=1e-5, atol=1e-5)
    found = other.draft.trainable()
    for parameter, master in case.draft.trainable().items():
        assert (found[parameter].grad - master.grad).norm() < 1e-5 * master.grad.norm() + 1e-9, parameter
