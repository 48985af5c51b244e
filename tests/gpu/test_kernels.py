"""The GPU kernels compute what their plain counterparts do; TRITON_INTERPRET=1 runs them on a CPU."""

import os
from collections.abc import Callable

import pytest
import torch

from eyas.drafters.common.teacher_targets import TeacherTargets
from eyas.drafters.eagle3.fused import plain_ops
from eyas.kernels.head_layout import Heads

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
    ("heads", "lengths", "num_own", "window"),
    [
        (Heads(2, 4, 32), (70, 3, 200), 0, None),
        (Heads(2, 4, 32), (70, 3, 200), 3, None),
        (Heads(1, 3, 64), (150, 41), 2, None),
        (Heads(2, 1, 16), (33,), 1, None),
        (Heads(2, 4, 32), (70, 3, 200), 3, 4),
        (Heads(1, 3, 64), (150, 41), 2, 40),
        (Heads(2, 1, 16), (330,), 1, 100),
    ],
)
def test_attention_and_its_gradients(
    heads: Heads, lengths: tuple[int, ...], num_own: int, window: int | None
) -> None:
    from eyas.drafters.eagle3.fused import gpu_ops

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
    first = starts[place]
    if window is not None:
        first = torch.maximum(first, place + num_own + 1 - window)
    where = (own_index.int().to(DEVICE), first.int().to(DEVICE), place.int().to(DEVICE), heads)

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


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("kind", ["kl", "lk", "hybrid"])
@pytest.mark.parametrize("width", [61, 9000])
def test_loss_and_its_gradient(kind: str, width: int, part: bool) -> None:
    from eyas.drafters.eagle3.fused import gpu_ops

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
        coverage=torch.tensor([1.0, 0.26, 0.5, 0.9, 0.01], device=DEVICE) if part else None,
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
    from eyas.drafters.eagle3.fused import gpu_ops

    x = torch.randn(9, 6 * 32, device=DEVICE)
    angles = torch.randn(9, 16, device=DEVICE).repeat(1, 2)
    expected, found = torch.empty_like(x), torch.empty_like(x)
    plain_ops.rotate(x, angles.cos(), angles.sin(), 4, expected)
    gpu_ops.rotate(x, angles.cos(), angles.sin(), 4, found)
    assert close(found, expected, 1e-6)
    gpu_ops.rotate(found, angles.cos(), -angles.sin(), 4, found)
    assert close(found, x, 1e-6)


def test_swiglu_backward() -> None:
    from eyas.drafters.eagle3.fused import gpu_ops

    grad, gate_up = torch.randn(5, 1500, device=DEVICE), torch.randn(5, 3000, device=DEVICE)
    expected, found = gate_up.clone(), gate_up.clone()
    plain_ops.swiglu_backward_(grad, expected)
    gpu_ops.swiglu_backward_(grad, found)
    assert close(found, expected, 1e-5)


@pytest.mark.parametrize("width", [96, 128])
def test_norm_of_gathered_rows_and_its_backward(width: int) -> None:
    from eyas.drafters.eagle3.fused import gpu_ops

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
    from eyas.drafters.eagle3.fused import gpu_ops

    gate_up = torch.randn(5, 3000, device=DEVICE)
    expected, found = torch.zeros(5, 1500, device=DEVICE), torch.zeros(5, 1500, device=DEVICE)
    plain_ops.swiglu(gate_up, expected)
    gpu_ops.swiglu(gate_up, found)
    assert close(found, expected, 1e-5)


def test_teacher_rows() -> None:
    from eyas.kernels.teacher_kernel import restrict

    torch.manual_seed(0)
    logits = 4 * torch.randn(8, 5000, device=DEVICE)
    ids = torch.randperm(5000, device=DEVICE)[:2300].sort().values
    logits[0, ids[7]] = 60.0  # sure of an id inside, and of one outside
    outside = next(i for i in range(5000) if i not in set(ids.tolist()))
    logits[1, outside] = 600.0
    probabilities = torch.empty(8, 2300, device=DEVICE)
    mass, entropy = torch.empty(8, device=DEVICE), torch.empty(8, device=DEVICE)
    argmax = torch.empty(8, dtype=torch.long, device=DEVICE)
    coverage = torch.empty(8, device=DEVICE)
    restrict(logits, ids, probabilities, mass, entropy, argmax, coverage)
    assert close(coverage, torch.softmax(logits, -1)[:, ids].sum(-1), 1e-5)
    assert torch.equal(argmax, logits.argmax(-1))
    inside = torch.isin(argmax, ids)
    assert not inside[1]
    assert inside.sum() > 1
    expected = torch.softmax(logits[:, ids], -1)[inside]
    assert close(probabilities[inside], expected, 1e-5)
    assert close(mass, probabilities.sum(-1), 1e-5)
    assert close(entropy, torch.xlogy(probabilities, probabilities).sum(-1), 1e-5)
    assert torch.isfinite(probabilities).all()


def skip_a_step_then_take_one(
    update: Callable[[bool], None],
    ours: torch.Tensor,
    copy: torch.Tensor,
    gradient: torch.Tensor,
    torchs: torch.optim.Optimizer,
    parameter: torch.nn.Parameter,
) -> None:
    """The skipped step changes nothing; the other is taken of ours and of torch's, gradients divided by 3."""
    update(False)
    assert torch.equal(ours, parameter)
    assert not copy.any()
    update(True)
    parameter.grad = gradient / 3
    torchs.step()


@pytest.mark.parametrize("num_taken", [0, 5])
def test_adamw_is_torchs_and_copies(num_taken: int) -> None:
    from eyas.kernels.adamw_kernel import adamw

    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(70, 61, device=DEVICE))
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    torchs = torch.optim.AdamW([parameter], **settings)
    for _ in range(num_taken):
        parameter.grad = torch.randn_like(parameter)
        torchs.step()
    state = torchs.state[parameter]
    mean = state["exp_avg"].clone() if state else torch.zeros_like(parameter)
    square = state["exp_avg_sq"].clone() if state else torch.zeros_like(parameter)
    ours, copy = parameter.detach().clone(), torch.zeros(70, 61, dtype=torch.bfloat16, device=DEVICE)
    gradient = torch.randn_like(ours)

    def update(taken: bool) -> None:
        rate, divisor = torch.tensor(1e-2, device=DEVICE), torch.tensor(3.0, device=DEVICE)
        shares = torch.tensor([1 - beta ** (num_taken + 1) for beta in (0.9, 0.95)], device=DEVICE)
        flag = torch.tensor(taken, device=DEVICE)
        adamw(ours, gradient, mean, square, copy, rate, divisor, shares, flag, (0.9, 0.95), 1e-8, 0.1)

    skip_a_step_then_take_one(update, ours, copy, gradient, torchs, parameter)
    assert close(ours, parameter.detach(), 1e-6)
    assert close(mean, torchs.state[parameter]["exp_avg"], 1e-6)
    assert close(square, torchs.state[parameter]["exp_avg_sq"], 1e-6)
    # The interpreter cuts where a GPU rounds.
    assert close(copy, ours.bfloat16(), 1e-2 if INTERPRETED else 0)


@pytest.mark.parametrize(("rows", "columns"), [(130, 96), (256, 200), (64, 64)])
def test_a_symmetric_product_is_the_whole_one(rows: int, columns: int) -> None:
    from eyas.kernels.muon_kernel import symmetric_product

    torch.manual_seed(0)
    dtype, tolerance = (torch.float32, 1e-5) if INTERPRETED else (torch.float16, 1e-3)
    x = torch.randn(rows, columns, device=DEVICE, dtype=dtype) / 8
    gram = x @ x.T
    further = torch.eye(rows, device=DEVICE, dtype=dtype)
    assert close(symmetric_product(x, x), gram, tolerance)
    found = symmetric_product(gram, gram, 0.1, gram, 2.0, further, -3.0)
    assert close(found, 0.1 * gram.float() @ gram.float() + 2 * gram - 3 * further, tolerance)
    assert torch.equal(found, found.T)


@pytest.mark.parametrize("shape", [(96, 200), (200, 96), (130, 140)])
def test_muon_is_torchs_and_copies(shape: tuple[int, int]) -> None:
    from eyas.kernels.muon_kernel import muon

    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(shape, device=DEVICE))
    torchs = torch.optim.Muon([parameter], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    parameter.grad = torch.randn_like(parameter)
    torchs.step()
    ours, momentum = parameter.detach().clone(), torchs.state[parameter]["momentum_buffer"].clone()
    start, copy = ours.clone(), torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
    gradient = torch.randn_like(ours)

    def update(taken: bool) -> None:
        rate, divisor = torch.tensor(1e-2, device=DEVICE), torch.tensor(3.0, device=DEVICE)
        flag = torch.tensor(taken, device=DEVICE)
        muon(ours, gradient, momentum, copy, rate, divisor, flag, torchs.param_groups[0])

    skip_a_step_then_take_one(update, ours, copy, gradient, torchs, parameter)
    assert close(momentum, torchs.state[parameter]["momentum_buffer"], 1e-6)
    assert close(ours - start, parameter.detach() - start, 0.05)  # both round, torch in bfloat16
    assert close(copy, ours.bfloat16(), 1e-2 if INTERPRETED else 0)


@pytest.mark.skipif(INTERPRETED, reason="of the size that matters: for a GPU")
@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize("shape", [(4096, 14336), (4096, 4096), (1024, 8192)])
def test_newton_schulz_is_nearer_to_exact_steps_than_torchs(shape: tuple[int, int], falling: bool) -> None:
    from eyas.kernels.muon_kernel import SCALE, orthogonalized

    torch.manual_seed(0)
    x = torch.randn(shape, device=DEVICE)
    if falling:
        x *= torch.logspace(0, -3, shape[0], device=DEVICE)[:, None]
    group = torch.optim.Muon([torch.nn.Parameter(x)]).param_groups[0]
    a, b, c = group["ns_coefficients"]

    def steps(x: torch.Tensor) -> torch.Tensor:
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x

    exact = steps(x)
    found = orthogonalized(x, (a, b, c), group["ns_steps"], group["eps"]) / SCALE
    error, torchs = ((y.float() - exact).norm() / exact.norm() for y in (found, steps(x.bfloat16())))
    assert error <= torchs
    assert error <= 0.05
