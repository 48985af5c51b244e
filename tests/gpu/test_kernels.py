"""The GPU kernels compute what their plain counterparts do; TRITON_INTERPRET=1 runs them on a CPU."""

import os

import pytest
import torch

from eyas.train.fused import plain_ops
from eyas.train.fused.heads import Heads
from eyas.train.teacher import TeacherTargets

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() or INTERPRETED),
        reason="needs a CUDA device (or TRITON_INTERPRET=1 and triton)",
    ),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = 1e-5


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    return bool((found.float() - expected.float()).norm() <= tolerance * expected.float().norm())


@pytest.mark.parametrize(
    ("heads", "lengths", "num_own"),
    [
        (Heads(2, 4, 32), (70, 3, 200), 0),
        (Heads(2, 4, 32), (70, 3, 200), 3),
        (Heads(1, 3, 64), (150, 41), 2),
        (Heads(2, 1, 16), (33,), 1),
    ],
)
def test_attention_and_its_gradients(heads: Heads, lengths: tuple[int, ...], num_own: int) -> None:
    from eyas.train.fused import gpu_ops

    torch.manual_seed(0)
    num_keys = sum(lengths)
    starts = torch.cat([torch.full((n,), sum(lengths[:d])) for d, n in enumerate(lengths)])
    place = (torch.rand(num_keys) < 0.6).nonzero().flatten()
    num_rows = len(place)
    kv_width, width = 2 * heads.kv_heads * heads.head_dim, heads.kv_heads * heads.group * heads.head_dim
    own_index = (
        torch.stack([torch.randperm(num_rows) + j * num_rows for j in range(num_own)], 1)
        if num_own
        else (torch.empty(num_rows, 0))
    )
    queries, first_kv, own_kv, grad = (
        torch.randn(n, w, device=DEVICE)
        for n, w in (
            (num_rows, width),
            (num_keys, kv_width),
            (num_rows * num_own, kv_width),
            (num_rows, width),
        )
    )
    where = (own_index.int().to(DEVICE), starts[place].int().to(DEVICE), place.int().to(DEVICE), heads)

    results = []
    for ops in (plain_ops, gpu_ops):
        out = torch.full_like(queries, float("nan"))
        lse = ops.attend(queries, first_kv, own_kv, *where, out)
        grad_first, grad_own = torch.ones_like(first_kv), torch.ones_like(own_kv)
        grad_queries = ops.attend_backward(
            grad, out, lse, queries, first_kv, own_kv, *where, grad_first, grad_own
        )
        results.append((out, grad_queries, grad_first - 1, grad_own - 1))
    for expected, found in zip(*results, strict=True):
        assert close(found, expected)


@pytest.mark.parametrize("kind", ["kl", "lk", "hybrid"])
@pytest.mark.parametrize("width", [61, 9000])
def test_loss_and_its_gradient(kind: str, width: int) -> None:
    from eyas.train.fused import gpu_ops

    torch.manual_seed(0)
    logits = 3 * torch.randn(7, width, device=DEVICE)
    probabilities = torch.softmax(3 * torch.randn(5, width, device=DEVICE), -1)
    probabilities[2, : width // 2] = 0
    probabilities[4] *= 0.97  # as rounding might, but visibly
    targets = TeacherTargets(
        probabilities=probabilities,
        mass=probabilities.sum(-1),
        negative_entropy=torch.xlogy(probabilities, probabilities).sum(-1),
        argmax=probabilities.argmax(-1),
        in_draft=torch.tensor([True, True, False, True, True], device=DEVICE),
    )
    index = torch.tensor([0, 2, 2, 4, 1, 3, 0], device=DEVICE)
    plain, fast = logits.clone(), logits.clone()
    expected, best = plain_ops.loss_and_gradient_(plain, targets, index, 0.7, kind, True)
    found, found_best = gpu_ops.loss_and_gradient_(fast, targets, index, 0.7, kind, True)
    counts = targets.in_draft[index]
    assert close(found, expected, 1e-5)
    assert close(fast, plain, 1e-4)
    assert torch.equal(best[counts], found_best[counts])


def test_rotation_and_its_inverse() -> None:
    from eyas.train.fused import gpu_ops

    x = torch.randn(9, 6 * 32, device=DEVICE)
    angles = torch.randn(9, 16, device=DEVICE).repeat(1, 2)
    expected, found = torch.empty_like(x), torch.empty_like(x)
    plain_ops.rotate(x, angles.cos(), angles.sin(), 4, expected)
    gpu_ops.rotate(x, angles.cos(), angles.sin(), 4, found)
    assert close(found, expected, 1e-6)
    gpu_ops.rotate(found, angles.cos(), -angles.sin(), 4, found)
    assert close(found, x, 1e-6)


def test_swiglu_backward() -> None:
    from eyas.train.fused import gpu_ops

    grad, gate_up = torch.randn(5, 1500, device=DEVICE), torch.randn(5, 3000, device=DEVICE)
    expected, found = gate_up.clone(), gate_up.clone()
    plain_ops.swiglu_backward_(grad, expected)
    gpu_ops.swiglu_backward_(grad, found)
    assert close(found, expected, 1e-5)


@pytest.mark.parametrize("width", [96, 128])
def test_norm_of_gathered_rows_and_its_backward(width: int) -> None:
    from eyas.train.fused import gpu_ops

    torch.manual_seed(0)
    x, weight = torch.randn(20, width, device=DEVICE), 1 + 0.2 * torch.randn(width, device=DEVICE)
    index = torch.tensor([3, 3, 19, 0, 7], device=DEVICE)
    residual, where = torch.randn(3, width, device=DEVICE), torch.tensor([2, -1, 0, 1, -1], device=DEVICE)
    wide_grad = torch.randn(5, 2 * width, device=DEVICE)
    results = []
    for ops in (plain_ops, gpu_ops):
        both, copy = torch.zeros(5, 2 * width, device=DEVICE), torch.zeros(5, width, device=DEVICE)
        ops.rms(x, weight, 1e-5, both[:, width:], index=index, copy=copy)
        out, all_rows = torch.zeros(5, width, device=DEVICE), torch.zeros_like(x)
        of_weight = ops.rms_backward(
            wide_grad[:, width:],
            x,
            weight,
            1e-5,
            index=index,
            residual=residual,
            residual_index=where,
            out=out,
        )
        only_weight = ops.rms_backward(all_rows + 1, x, weight, 1e-5)
        results.append((both, copy, out, of_weight, only_weight))
    for expected, found in zip(*results, strict=True):
        assert close(found, expected, 1e-5)


def test_swiglu() -> None:
    from eyas.train.fused import gpu_ops

    gate_up = torch.randn(5, 3000, device=DEVICE)
    expected, found = torch.zeros(5, 1500, device=DEVICE), torch.zeros(5, 1500, device=DEVICE)
    plain_ops.swiglu(gate_up, expected)
    gpu_ops.swiglu(gate_up, found)
    assert close(found, expected, 1e-5)


def test_teacher_rows() -> None:
    from eyas.train.fused.teacher_kernel import restrict

    torch.manual_seed(0)
    logits = 4 * torch.randn(6, 5000, device=DEVICE)
    ids = torch.randperm(5000, device=DEVICE)[:2300].sort().values
    probabilities = torch.empty(6, 2300, device=DEVICE)
    argmax = torch.empty(6, dtype=torch.long, device=DEVICE)
    mass = torch.empty(6, device=DEVICE)
    entropy = torch.empty(6, device=DEVICE)
    restrict(logits, ids, probabilities, mass, entropy, argmax)
    assert close(entropy, torch.xlogy(probabilities, probabilities).sum(-1), 1e-5)
    assert close(mass, probabilities.sum(-1), 1e-5)
    assert torch.equal(argmax, logits.argmax(-1))
    assert close(probabilities, torch.softmax(logits[:, ids], -1), 1e-5)
