"""The trainer computes the loss and gradients of the plain reference."""

import dataclasses

import numpy as np
import pytest
import torch

from eyas.drafters.common.batch import pack_batch
from eyas.drafters.eagle3.ttt_rows import rows_of
from eyas.drafters.eagle3.unroll import UnrollResult, run_unroll
from eyas.types import TokenizedSample
from reference import reference_logits, reference_loss
from train_cases import EPS, THETA, Case, make_case

CPU = torch.device("cpu")
DECAY = 0.8


def trainer_result(case: Case, num_steps: int) -> UnrollResult:
    batch = pack_batch(case.states, rows_of(num_steps), CPU, torch.float32)
    return run_unroll(case.draft, case.teacher, case.target_ids, batch, DECAY)


def trainer_gradients(case: Case, num_steps: int) -> tuple[float, dict[str, torch.Tensor | None]]:
    case.draft.zero_grad(set_to_none=True)
    result = trainer_result(case, num_steps)
    result.loss.backward()
    return float(result.loss.detach()), {n: p.grad for n, p in case.draft.named_parameters()}


def reference_gradients(
    case: Case, num_steps: int, dtype: torch.dtype = torch.float64
) -> tuple[float, dict[str, torch.Tensor]]:
    """The reference runs in fp64, so that what is measured is the trainer's own rounding."""
    weights = {n: p.detach().to(dtype).requires_grad_(True) for n, p in case.draft.named_parameters()}
    config = case.draft.config
    logits = reference_logits(
        weights,
        case.samples,
        case.aux.to(dtype),
        num_steps,
        config.num_attention_heads,
        config.num_key_value_heads,
        EPS,
        THETA,
        config.norm_output,
        config.norm_before_residual,
        config.sliding_window,
    )
    teacher = dataclasses.replace(
        case.teacher, norm_weight=case.teacher.norm_weight.double(), head=case.teacher.head.double()
    )
    # The teacher's norm runs in fp32 by contract; its inputs are exact in both.
    teacher_logits = teacher.logits(case.last.double()).to(dtype)
    loss = reference_loss(logits, case.samples, teacher_logits, case.target_ids, DECAY)
    loss.backward()
    return float(loss.detach()), {n: w.grad for n, w in weights.items() if w.grad is not None}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_loss_and_every_gradient_equal_the_plain_reference(seed: int, num_steps: int) -> None:
    lengths = tuple(np.random.default_rng(seed).integers(2, 40, size=4).tolist())
    case = make_case(seed, lengths, share=[0.1, 0.5, 0.9][seed % 3])
    expected_loss, expected = reference_gradients(case, num_steps)
    loss, gradients = trainer_gradients(case, num_steps)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert loss > 0
    for name in case.draft.trainable():
        assert relative(gradients[name], expected[name]) < 1e-5, name


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize(("window", "num_steps"), [(1, 4), (3, 7), (7, 7), (8, 3), (100, 4)])
def test_a_window_equals_the_plain_reference(window: int, num_steps: int, num_layers: int) -> None:
    """Also one that is smaller than the steps, which look beyond every key of step 0."""
    case = make_case(window, num_layers=num_layers, window=window)
    expected_loss, expected = reference_gradients(case, num_steps)
    loss, gradients = trainer_gradients(case, num_steps)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name in case.draft.trainable():
        assert relative(gradients[name], expected[name]) < 1e-5, name
    wide = make_case(window, num_layers=num_layers)
    assert (trainer_gradients(wide, num_steps)[0] == pytest.approx(loss, rel=1e-6)) == (window == 100)


@pytest.mark.parametrize(("fc_norm", "norm_output"), [(True, False), (False, True), (True, True)])
def test_eagle_3_1_equals_the_plain_reference(fc_norm: bool, norm_output: bool) -> None:
    case = make_case(9, fc_norm=fc_norm, norm_output=norm_output)
    expected_loss, expected = reference_gradients(case, 4)
    loss, gradients = trainer_gradients(case, 4)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert ("fc_norm.2.weight" in gradients) == fc_norm
    for name in case.draft.trainable():
        assert relative(gradients[name], expected[name]) < 1e-5, name


@pytest.mark.parametrize(("num_layers", "norm_output"), [(2, False), (2, True), (3, False)])
def test_a_draft_of_several_layers_equals_the_plain_reference(num_layers: int, norm_output: bool) -> None:
    case = make_case(4, (19, 2, 25), share=0.3, num_layers=num_layers, norm_output=norm_output)
    expected_loss, expected = reference_gradients(case, 4)
    loss, gradients = trainer_gradients(case, 4)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert f"layers.{num_layers - 1}.self_attn.q_proj.weight" in gradients
    assert "layers.1.hidden_norm.weight" not in gradients
    for name in case.draft.trainable():
        assert relative(gradients[name], expected[name]) < 1e-5, name


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_draft_with_the_norms_of_speculators_equals_the_plain_reference(num_layers: int) -> None:
    norms = {"norm_before_residual": True, "norm_before_fc": True}
    case = make_case(6, (19, 2, 25), share=0.4, num_layers=num_layers, **norms)
    expected_loss, expected = reference_gradients(case, 4)
    loss, gradients = trainer_gradients(case, 4)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name in case.draft.trainable():
        assert relative(gradients[name], expected[name]) < 1e-5, name


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_draft_with_latent_attention_equals_the_plain_reference(num_layers: int) -> None:
    latent = {
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 7,
    }
    case = make_case(5, (19, 2, 25), share=0.4, latent=latent, num_layers=num_layers)
    expected_loss, expected = reference_gradients(case, 5)
    loss, gradients = trainer_gradients(case, 5)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert "layers.0.self_attn.q_a_layernorm.weight" in gradients
    for name in case.draft.trainable():
        assert relative(gradients[name], expected[name]) < 1e-5, name


def test_gradients_reach_every_trainable_tensor_and_no_frozen_one() -> None:
    case = make_case(0)
    _, gradients = trainer_gradients(case, 3)
    trainable = case.draft.trainable()
    for name, gradient in gradients.items():
        if name in trainable:
            assert gradient is not None, name
            assert gradient.abs().sum() > 0, name
        else:
            assert gradient is None, name
    assert set(gradients) - set(trainable) == {"embed_tokens.weight"}


def test_loss_is_zero_and_every_draft_token_accepted_when_draft_is_teacher() -> None:
    """A draft whose head and norm are the teacher's, on states that never leave the teacher's stream."""
    case = make_case(1, draft_vocab=61)
    width = case.draft.config.hidden_size
    with torch.no_grad():
        for name, parameter in case.draft.trainable().items():
            if name.startswith("layers") and name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()  # the layer adds nothing: the hidden state of a row stays fc(aux)
        case.draft.fc.weight.zero_()
        case.draft.fc.weight[:, -width:] = torch.eye(width)
        case.draft.norm.weight.copy_(case.teacher.norm_weight)
        case.draft.lm_head.weight.copy_(case.teacher.head)
        # One state for the whole document: the state that the draft carries is every position's.
        case.aux[:] = case.last[:1, None]
        case.last[:] = case.last[:1]
    result = trainer_result(case, 4)
    entropy = -torch.distributions.Categorical(logits=case.teacher.logits(case.last[:1])).entropy()
    assert float(result.loss.detach()) == pytest.approx(0, abs=1e-4 * abs(float(entropy)))
    assert torch.equal(result.accepted, result.depth)
    assert int(result.depth.max()) == 4


def test_masked_tokens_and_their_teachers_change_nothing_but_through_attention() -> None:
    """What no supervised row reads or attends to has no influence: the tokens after the last answer."""
    case = make_case(2, (25, 17))
    for place, sample in enumerate(case.samples):
        mask = sample.loss_mask.copy()
        mask[len(mask) // 2 :] = False
        mask[2:6] = True
        case.samples[place] = TokenizedSample(sample.sample_id, sample.input_ids, mask)
    loss, gradients = trainer_gradients(case, 5)
    end = 0
    for place, sample in enumerate(case.samples):
        start, end = end, end + len(sample)
        quiet = len(sample) // 2 + 1
        ids = sample.input_ids.copy()
        ids[quiet:] = (ids[quiet:] + 7) % case.draft.config.target_vocab_size
        case.samples[place] = dataclasses.replace(sample, input_ids=ids)
        case.aux[start + quiet : end] += 3
        case.last[start + quiet : end] += 3
    changed_loss, changed = trainer_gradients(case, 5)
    assert changed_loss == loss
    for name in case.draft.trainable():
        assert torch.equal(gradients[name], changed[name]), name


def test_a_document_never_sees_another() -> None:
    """Packed losses and gradients are the sums of those of each document alone."""
    case = make_case(3, (19, 23, 8))
    loss, gradients = trainer_gradients(case, 5)
    alone_loss, alone = 0.0, {name: torch.zeros_like(p) for name, p in case.draft.trainable().items()}
    end = 0
    for sample in case.samples:
        start, end = end, end + len(sample)
        one = dataclasses.replace(case, samples=[sample], aux=case.aux[start:end], last=case.last[start:end])
        one_loss, one_gradients = trainer_gradients(one, 5)
        alone_loss += one_loss
        for name in alone:
            alone[name] += one_gradients[name]
    assert loss == pytest.approx(alone_loss, rel=1e-5)
    for name in alone:
        assert relative(gradients[name], alone[name]) < 1e-5, name


def test_metrics_count_prefix_agreement_over_the_full_vocabulary() -> None:
    """``accepted`` is how many argmaxes in a row are the target's own, not the draft vocabulary's."""
    case = make_case(4)
    config = case.draft.config
    with torch.no_grad():
        logits = reference_logits(
            dict(case.draft.named_parameters()),
            case.samples,
            case.aux,
            5,
            config.num_attention_heads,
            config.num_key_value_heads,
            EPS,
            THETA,
        )
        result = trainer_result(case, 5)
    truth = case.teacher.logits(case.last).argmax(-1)
    batch = pack_batch(case.states, rows_of(5), CPU, torch.float32)
    for place, row in enumerate(batch.plan.rows[0].tolist()):
        accepted = 0
        for step in range(int(result.depth[place])):
            if case.target_ids[logits[step][row].argmax()] != truth[row + 1 + step]:
                break
            accepted += 1
        assert int(result.accepted[place]) == accepted
