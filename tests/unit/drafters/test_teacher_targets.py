"""What the draft is held to is the target's own distribution: compared with float64, id by id."""

import dataclasses

import numpy as np
import pytest
import torch

from eyas.drafters.common import teacher_targets as module
from eyas.drafters.common.teacher_targets import teacher_targets
from eyas.targets.teacher import TeacherHead
from slow_reference import softmax

V, D, R = 23, 8, 11
IDS = torch.tensor([0, 2, 3, 7, 11, 12, 20, 22])


@pytest.fixture
def teacher() -> TeacherHead:
    torch.manual_seed(0)
    fields = {f.name for f in dataclasses.fields(TeacherHead)}
    values = {
        "embedding": torch.randn(V, D),
        "head": torch.randn(V, D),
        "norm_weight": 1 + 0.3 * torch.randn(D),
        "norm_kind": "rms",
        "norm_eps": 1e-5,
        "logit_scale": 1.0,
        "logit_softcap": None,
    }
    return TeacherHead(**{name: value for name, value in values.items() if name in fields})


def exact_logits(teacher: TeacherHead, last: torch.Tensor) -> np.ndarray:
    x = last.double().numpy()
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * teacher.norm_weight.double().numpy()
    return normed @ teacher.head.double().numpy().T


@pytest.mark.parametrize("chunk", [1, 4, 1024])
@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("with_coverage", [False, True])
def test_targets_are_the_distribution_on_the_draft_vocabulary(
    teacher: TeacherHead, chunk: int, is_full: bool, with_coverage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK_ROWS", chunk)
    last = 3 * torch.randn(R, D)
    ids = torch.arange(V) if is_full else IDS
    found = teacher_targets(teacher, last, ids, is_full, with_coverage)
    logits = exact_logits(teacher, last)
    wanted = np.stack([softmax(row[ids.numpy()]) for row in logits])
    np.testing.assert_allclose(found.probabilities.numpy(), wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.mass.numpy(), 1, rtol=1e-5)
    np.testing.assert_allclose(
        found.negative_entropy.numpy(), (wanted * np.log(wanted)).sum(-1), rtol=1e-4, atol=1e-5
    )
    assert found.argmax.tolist() == logits.argmax(-1).tolist()
    assert found.in_draft.tolist() == [i in ids.tolist() for i in logits.argmax(-1).tolist()]
    if with_coverage and not is_full:
        assert found.coverage is not None
        covered = [softmax(row)[ids.numpy()].sum() for row in logits]
        np.testing.assert_allclose(found.coverage.numpy(), covered, rtol=1e-4)
        assert min(covered) < 0.5 < max(covered)
    else:
        assert found.coverage is None
    assert is_full or set(found.in_draft.tolist()) == {True, False}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mass_and_entropy_are_those_of_probabilities_that_were_rounded_to_16_bits(
    teacher: TeacherHead, dtype: torch.dtype
) -> None:
    last = (3 * torch.randn(R, D)).to(dtype)
    found = teacher_targets(teacher.to(torch.device("cpu"), dtype), last, IDS, False, True)
    assert found.probabilities.dtype == dtype
    assert found.mass.dtype == found.negative_entropy.dtype == torch.float32
    p = found.probabilities.double()
    torch.testing.assert_close(found.mass.double(), p.sum(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        found.negative_entropy.double(), torch.xlogy(p, p).sum(-1), rtol=1e-5, atol=1e-5
    )
    exact = np.stack([softmax(row[IDS.numpy()]) for row in exact_logits(teacher, last.float())])
    np.testing.assert_allclose(p.numpy(), exact, atol=8 * torch.finfo(dtype).eps)


def test_no_rows_have_no_targets(teacher: TeacherHead) -> None:
    found = teacher_targets(teacher, torch.empty(0, D), IDS, False, True)
    assert found.probabilities.shape == (0, len(IDS))
    assert len(found.mass) == len(found.argmax) == len(found.in_draft) == 0
