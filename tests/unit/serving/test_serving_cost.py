"""The benchmark's cost model finds the costs that measurements were made from."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


cost = load("serving_cost")


def points(num_draft_tokens: tuple[int, ...], noise: float = 0.0) -> list[object]:
    truth = cost.CostModel(
        {
            "step": 4.0,
            "token": 0.004,
            "ridge": 0.02,
            "context": 2e-5,
            "draft_step": 0.4,
            "draft_token": 0.002,
            "round_extra": 0.3 if len(num_draft_tokens) > 2 else 0.0,
        },
        128,
    )
    out = []
    for i, (k, b) in enumerate((k, b) for k in num_draft_tokens for b in (1, 2, 4, 8, 16, 32, 48, 64)):
        blank = cost.Point(b, k, 500.0 + 40 * k, 1.0)
        out.append(cost.Point(b, k, blank.context_tokens, truth.round_ms(blank) * (1 + noise * (-1) ** i)))
    return out


@pytest.mark.parametrize("num_draft_tokens", [(0, 3), (0, 1, 3, 5)])
def test_it_gives_back_rounds_made_from_known_costs(num_draft_tokens: tuple[int, ...]) -> None:
    measured = points(num_draft_tokens)
    model = cost.fit(measured)
    assert max(abs(model.error(p)) for p in measured) < 1e-6
    assert max(map(abs, cost.left_out_errors(measured))) < 0.05


def test_noise_stays_of_its_size_and_no_cost_is_negative() -> None:
    measured = points((0, 3), noise=0.03)
    model = cost.fit(measured)
    assert max(abs(model.error(p)) for p in measured) < 0.06
    assert min(model.coefficients.values()) >= 0


def test_a_draft_that_costs_nothing_gets_no_cost() -> None:
    measured = [cost.Point(b, k, 100.0, 5.0) for k in (0, 3) for b in (1, 2, 4)]
    model = cost.fit(measured)
    assert model.coefficients["step"] == pytest.approx(5.0)
    assert model.coefficients["draft_step"] == pytest.approx(0, abs=1e-6)
