"""Compare schedules of Newton-Schulz steps for Muon: singular values they reach, rounding, and time on a GPU.

A schedule is a list of coefficients and the lengths of its chunks: each chunk multiplies X once. On a CPU the
kernel's float16 products are emulated (float32 sums, results rounded); on a GPU they are the kernel's. Prints
one JSON object for each schedule and shape, and gradients of several spectra:

    python benchmarks/newton_schulz.py --shapes 512x1792,512x512
    python benchmarks/newton_schulz.py --device cuda --shapes 4096x14336,4096x4096,1024x8192
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

SCALE = 256.0  # as in the kernel, which needs triton
TORCHS = ((3.4445, -4.775, 2.0315),) * 5
Coefficients = tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class Schedule:
    steps: Coefficients
    chunks: tuple[int, ...]
    schatten: bool = False  # normalize by the Schatten 4-norm, sqrt(norm of X X^T), instead of Frobenius


def minimax(lowest: float, highest: float) -> tuple[tuple[float, float, float], float]:
    """Return a, b, c for which a x + b x^3 + c x^5 is nearest to 1 in an interval, and the largest error.

    Source: Polar Express, https://arxiv.org/abs/2505.16932; composing the best of each step is the best.
    """
    inner = lowest + (highest - lowest) * np.array([0.25, 0.75])
    for _ in range(500):  # Remez
        x = np.array([lowest, *inner, highest])
        a, b, c, error = np.linalg.solve(np.stack([x, x**3, x**5, [1, -1, 1, -1]], 1), np.ones(4))
        before, inner = inner, np.sqrt(np.abs(np.sort(np.roots([5 * c, 3 * b, a]).real)))
        if np.abs(inner - before).max() < 1e-14:
            break
    return (float(a), float(b), float(c)), float(abs(error))


def polar_express(lowest: float, num_steps: int) -> Coefficients:
    """Return the best steps for singular values from ``lowest`` to 1."""
    steps, highest = [], 1.0
    for _ in range(num_steps):
        step, error = minimax(lowest, highest)
        steps.append(step)
        lowest, highest = 1 - error, 1 + error
    return tuple(steps)


SCHEDULES = {
    "torch's 3+2": Schedule(TORCHS, (3, 2)),
    "from 1.4e-3, 4": Schedule(polar_express(1.4e-3, 4), (4,)),
    "from 1.4e-3, 2+2": Schedule(polar_express(1.4e-3, 4), (2, 2)),
    "from 3e-3, 2+2": Schedule(polar_express(3e-3, 4), (2, 2)),
    "from 3e-3, 4, Schatten": Schedule(polar_express(3e-3, 4), (4,), schatten=True),
    "from 3e-3, 2+2, Schatten": Schedule(polar_express(3e-3, 4), (2, 2), schatten=True),
}


def emulated(left, right, alpha=1.0, plus=None, beta=0.0, further=None, gamma=0.0):  # type: ignore[no-untyped-def]
    """Compute ``symmetric_product`` without a GPU: the lower triangle, rounded to float16 and mirrored."""
    total = alpha * (left.float() @ right.float().T)
    if plus is not None:
        total += beta * plus.float()
    if further is not None:
        total += gamma * further.float()
    return (total.tril() + total.tril(-1).T).half()


def _kernel() -> Callable[..., torch.Tensor]:
    from eyas.kernels import muon_kernel

    assert muon_kernel.SCALE == SCALE
    return muon_kernel.symmetric_product


def orthogonalized(x: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """Return what the kernel would of float32 ``x`` [A, B], A <= B, but with singular values near 1."""
    product = _kernel() if x.is_cuda else emulated
    x = (x / (x.norm() / SCALE)).half()
    steps = list(schedule.steps)
    for chunk, length in enumerate(schedule.chunks):
        gram = product(x, x, SCALE**-2)
        if schedule.schatten and chunk == 0:
            norm = gram.float().norm()
            gram, x = (gram.float() / norm).half(), (x.float() * norm.rsqrt()).half()
        p, scale = None, 1.0
        for left in reversed(range(length)):
            a, b, c = steps.pop(0)
            q = product(gram, gram, c, gram, b)
            p, scale = (q, a) if p is None else (product(q, p, 1.0, p, a, q, scale), scale * a)
            if left:
                half = product(gram, q, 1.0, gram, a)
                gram = product(half, q, 1.0, half, a)
        if x.is_cuda:
            x = torch.addmm(x, p, x, beta=scale)
        else:
            x = (scale * x.float() + p.float() @ x.float()).half()
    return x.float() / SCALE


def exact(x: torch.Tensor, schedule: Schedule) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the composition in float64, the singular values it starts from, by Frobenius, and ends with."""
    x = x.double() / x.double().norm()
    left, sigma, right = torch.linalg.svd(x, full_matrices=False)
    y = sigma / sigma.norm(4) if schedule.schatten else sigma
    for a, b, c in schedule.steps:
        y = a * y + b * y**3 + c * y**5
    return (left * y) @ right, sigma, y


def gradients(rows: int, columns: int, device: str) -> dict[str, torch.Tensor]:
    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    fall = torch.logspace(0, -3, rows, device=device)[:, None]
    made = {"Gaussian": noise(rows, columns), "rows over 3 decades": noise(rows, columns) * fall}
    for rank, rest in ((32, 1e-2), (4, 1e-3)):
        low = noise(rows, rank) @ noise(rank, columns) / rank**0.5
        made[f"rank {rank} and {rest:g} of noise"] = low + rest * noise(rows, columns)
    return made


def time_ms(work: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return round(float(do_bench(work, warmup=50, rep=200, return_mode="median")), 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--shapes", default="512x1792,512x512", help="rows x columns, not more rows than columns"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    for shape in options.shapes.split(","):
        rows, columns = map(int, shape.split("x"))
        cases = gradients(rows, columns, options.device)
        for name, schedule in SCHEDULES.items():
            line: dict[str, object] = {"shape": shape, "schedule": name, "device": options.device}
            for case, x in cases.items():
                want, before, after = exact(x, schedule)
                found = orthogonalized(x, schedule).double()
                held = after[before >= 1.4e-3]
                line[case] = {
                    "error": round(float((found - want).norm() / want.norm()), 4),
                    "largest": round(float(torch.linalg.matrix_norm(found, 2)), 3),
                    "exact_from_1.4e-3": [round(float(v), 3) for v in (held.min(), held.max())],
                }
            if options.device == "cuda":
                some = cases["Gaussian"]
                line["ms"] = time_ms(lambda x=some, s=schedule: orthogonalized(x, s))  # type: ignore[misc]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
