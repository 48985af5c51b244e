"""The objective of block drafts against the slow reference: loss and every gradient to 1e-5."""

from typing import Any

import pytest
import torch

from block_cases import BlockCase, make_block_case
from block_reference import depth_of, reference_loss, slot_logits
from eyas.drafters.common.block.attention import PlainBlockAttention
from eyas.drafters.common.block.fast import FastBlockObjective

CASES: dict[str, dict[str, Any]] = {
    "dflash, d-pace, window smaller than documents": {"name": "dflash"},
    "dflash, ce": {"name": "dflash", "loss": "ce", "seed": 1},
    "dflash, kl": {"name": "dflash", "loss": "kl", "seed": 2},
    "dflash, every slot sees its whole block, all of the context": {
        "name": "dflash", "causal": False, "window": None, "seed": 3,
    },
    "dflash, d-pace, part of the vocabulary": {"name": "dflash", "draft_vocab": 29, "seed": 4},
    "dflash, kl, part of the vocabulary, bidirectional window": {
        "name": "dflash", "loss": "kl", "draft_vocab": 29, "causal": False, "seed": 5,
    },
    "dflash, one layer, blocks longer than answers": {"size": 16, "window": 16, "num_layers": 1},
    "dflash, logits that the target scales": {"name": "dflash", "logit_scale": 0.25, "seed": 8},
    "dspark, logits that the target scales": {"name": "dspark", "logit_scale": 0.25, "seed": 9},
    "dspark": {"name": "dspark"},
    "dspark, ce": {"name": "dspark", "loss": "ce", "seed": 10},
    "dspark, part of the vocabulary": {"name": "dspark", "draft_vocab": 29, "seed": 6},
    "dspark, bidirectional, no window": {"name": "dspark", "causal": False, "window": None, "seed": 7},
}  # fmt: skip


def slow(case: BlockCase) -> tuple[float, dict[str, torch.Tensor]]:
    weights = {
        name: value.detach().double().requires_grad_(name in case.draft.trainable())
        for name, value in case.draft.state_dict().items()
        if value.is_floating_point()
    }
    teacher = case.teacher.to("cpu", torch.float64)
    loss, num = reference_loss(
        weights, case.kind, case.samples, case.aux.double(), teacher.logits(case.last.double()),
        case.target_ids, case.anchors,
    )  # fmt: skip
    assert num == case.plan.num_supervised
    loss.backward()
    gradients = {name: w.grad for name, w in weights.items() if w.grad is not None}
    return float(loss.detach()), gradients


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_loss_and_every_gradient_equal_those_of_the_reference(settings: dict[str, Any]) -> None:
    case = make_block_case(**settings)
    sums = case.objective(chunk_rows=20).backward(case.batch)
    loss, gradients = slow(case)
    assert float(sums[0]) == pytest.approx(loss, rel=1e-5)
    assert int(sums[-1]) == case.plan.num_supervised
    assert gradients.keys() == case.draft.trainable().keys()
    for name, parameter in case.draft.trainable().items():
        assert parameter.grad is not None, name
        scale = gradients[name].abs().max()
        assert scale > 0, name
        assert (parameter.grad - gradients[name]).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_the_loss_fused_with_its_gradient_is_the_plain_one(settings: dict[str, Any]) -> None:
    plain, fast = make_block_case(**settings), make_block_case(**settings)
    expected = plain.objective().backward(plain.batch)
    objective = fast.objective(FastBlockObjective, make_attend=PlainBlockAttention, chunk_rows=20)
    found = objective.backward(fast.batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradients = plain.draft.trainable()
    for name, parameter in fast.draft.trainable().items():
        of_plain = gradients[name].grad
        assert parameter.grad is not None, name
        assert of_plain is not None, name
        assert (parameter.grad - of_plain).abs().max() <= 1e-5 * of_plain.abs().max(), name


@pytest.mark.parametrize("draft_vocab", [5, 4])
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_sums_and_ratios_are_those_of_the_reference_counted_by_prediction(
    name: str, draft_vocab: int
) -> None:
    case = make_block_case(name, target_vocab=5, draft_vocab=draft_vocab, num_anchors=20, share=0.8)
    objective = case.objective(chunk_rows=20)
    sums = objective.backward(case.batch)
    weights = {n: v.double() for n, v in case.draft.state_dict().items() if v.is_floating_point()}
    teacher = case.teacher.to("cpu", torch.float64).logits(case.last.double())
    starts = [sum(len(s) for s in case.samples[:d]) for d in range(len(case.samples))]
    ids, num = case.target_ids.tolist(), case.draft.config.num_predictions
    ce, agreed, judged = ([0.0] * num for _ in range(3))
    for document, anchor in case.anchors:
        sample, start = case.samples[document], starts[document]
        aux = case.aux[start : start + len(sample)].double()
        logits, _ = slot_logits(weights, case.kind, sample, aux, anchor)
        agrees = True
        for j in range(depth_of(sample, anchor, num)):
            label = int(teacher[start + anchor + j].argmax())
            judged[j] += 1
            agrees = agrees and label == ids[int(logits[j].argmax())]
            agreed[j] += agrees
            if label in ids:
                ce[j] -= float(torch.log_softmax(logits[j], -1)[ids.index(label)])
    assert sums[1 : 1 + num].tolist() == pytest.approx(ce, rel=1e-5)
    assert sums[1 + num : 1 + 2 * num].tolist() == agreed
    assert sums[1 + 2 * num : 1 + 3 * num].tolist() == judged
    assert 0 < agreed[1] < agreed[0] < judged[0], "the case shows nothing"
    found = objective.ratios(sums.tolist())
    assert found["loss"] == float(sums[0] / sums[-1])
    assert found["agreement"] == pytest.approx([a / j for a, j in zip(agreed, judged, strict=True)])
    assert found["cross_entropy"] == pytest.approx([c / j for c, j in zip(ce, judged, strict=True)], rel=1e-5)
    assert ("confidence_error" in found) == (name == "dspark")


def test_a_batch_without_a_block_has_sums_of_zero_and_ratios_all_the_same() -> None:
    case = make_block_case("dspark", num_anchors=0)
    objective = case.objective()
    sums = objective.backward(case.batch)
    assert sums.tolist() == [0.0] * objective.num_sums
    assert objective.ratios(sums.tolist())["loss"] == 0


def test_gradients_of_batches_add_up_in_the_masters_and_copies_follow_a_refresh() -> None:
    case = make_block_case("dspark")
    objective = case.objective(FastBlockObjective, make_attend=PlainBlockAttention)
    objective.start()
    objective.backward(case.batch)
    once = {n: p.grad.clone() for n, p in case.draft.trainable().items() if p.grad is not None}
    objective.backward(case.batch)
    for name, parameter in case.draft.trainable().items():
        torch.testing.assert_close(parameter.grad, 2 * once[name])
    with torch.no_grad():
        case.draft.fc.weight += 1.0
    before = objective.measure(case.batch, 2)[0]
    objective.refresh()
    assert objective.measure(case.batch, 2)[0][0] != before[0]
    assert objective.copies is not None
    assert objective.copies.keys() == set(case.draft.trainable().values())
