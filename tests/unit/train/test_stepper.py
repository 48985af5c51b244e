"""What a step of the optimizers does to weights: the scheduled rate, the mean gradient, or nothing at all."""

from typing import Any

import numpy as np
import pytest
import torch

from eyas.config.schema import TrainSettings
from eyas.train.learning_rate import learning_rate
from eyas.train.optim import StepOutcome, Stepper, make_optimizers
from slow_reference import adamw_steps

NUM_STEPS = 6
BETAS = (0.9, 0.95)


class Case:
    """A draft of four tensors and what steps it."""

    def __init__(self, optimizer: str, **settings: Any) -> None:
        torch.manual_seed(1)
        self.parameters = {
            "fc.weight": torch.nn.Parameter(torch.randn(8, 12)),
            "lm_head.weight": torch.nn.Parameter(torch.randn(10, 8)),
            "embed_tokens.weight": torch.nn.Parameter(torch.randn(10, 8)),
            "norm.weight": torch.nn.Parameter(torch.ones(8)),
        }
        defaults: dict[str, Any] = {"learning_rate": 0.05, "warmup_share": 0.5, "betas": BETAS}
        defaults |= {"weight_decay": 0.0, "max_grad_norm": 1e9}
        self.settings = TrainSettings(optimizer=optimizer, **(defaults | settings))
        self.adamw, self.muon = make_optimizers(
            self.parameters, self.settings, {"lm_head.weight"}, {"embed_tokens.weight"}
        )
        self.stepper = Stepper(self.adamw, self.settings, NUM_STEPS, muon=self.muon)
        self.rates = [learning_rate(step, NUM_STEPS, self.settings) for step in range(NUM_STEPS)]
        self.gradients = {name: torch.randn_like(p) for name, p in self.parameters.items()}

    def step(self, num_rows: float = 1.0, scale: float = 1.0, loss: float = 1.0) -> StepOutcome:
        """Step with the same gradients times ``scale`` as the sums over ``num_rows`` rows."""
        for name, parameter in self.parameters.items():
            parameter.grad = self.gradients[name] * scale
        return self.stepper.step(torch.tensor(loss), torch.tensor(num_rows))

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    @property
    def norm(self) -> float:
        return float(torch.cat([g.double().flatten() for g in self.gradients.values()]).norm())


def test_each_step_of_muon_moves_its_matrices_by_the_scheduled_rate() -> None:
    """The direction of a constant gradient does not change, so moves are as large as the rates."""
    case = Case("muon")
    assert max(case.rates) > 2 * min(case.rates)
    moves = []
    for rate in case.rates:
        before = case.weights
        outcome = case.step()
        assert float(outcome.rate) == pytest.approx(rate)
        moves.append(float((case.weights["fc.weight"] - before["fc.weight"]).norm()))
    # Updates have the size of AdamW's, 0.2 for each entry, within the rounding of bfloat16.
    sizes = [move / rate / 96**0.5 for move, rate in zip(moves, case.rates, strict=True)]
    assert sizes == pytest.approx([sizes[0]] * NUM_STEPS, rel=0.03)
    assert 0.1 < sizes[0] < 0.3


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_adamw_takes_the_steps_of_its_definition_at_the_scheduled_rates(optimizer: str, decay: float) -> None:
    case = Case(optimizer, weight_decay=decay)
    before = case.weights
    scales = [1.0, -2.0, 0.5, 3.0, -1.0, 1.0]
    for scale in scales:
        case.step(scale=scale)
    names = set(before) - ({"fc.weight"} if optimizer == "muon" else set())
    for name in names:
        gradient = case.gradients[name].double().numpy()
        expected = adamw_steps(
            before[name].double().numpy(),
            [gradient * scale for scale in scales],
            case.rates,
            BETAS,
            decay if before[name].ndim == 2 else 0.0,
        )
        np.testing.assert_allclose(case.weights[name].numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_muon_decays_its_matrices_by_the_scheduled_rate(decay: float) -> None:
    case = Case("muon", weight_decay=decay)
    case.gradients["fc.weight"].zero_()
    before = case.weights["fc.weight"]
    for _ in case.rates:
        case.step()
    kept = float(np.prod([1 - rate * decay for rate in case.rates]))
    torch.testing.assert_close(case.weights["fc.weight"], before * kept, rtol=1e-4, atol=1e-6)


def moments(case: Case) -> dict[str, torch.Tensor]:
    """Return what each optimizer kept of its first gradient."""
    found = {}
    for name, parameter in case.parameters.items():
        for optimizer in (case.adamw, case.muon):
            state = optimizer.state.get(parameter, {}) if optimizer else {}
            if "exp_avg" in state:
                found[name] = state["exp_avg"] / (1 - BETAS[0])
            elif "momentum_buffer" in state:
                found[name] = state["momentum_buffer"] / (1 - 0.95)
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("num_rows", [1.0, 40.0])
@pytest.mark.parametrize("most", [0.1, 1.0, 100.0])
def test_the_mean_gradient_is_clipped_to_its_limit(optimizer: str, num_rows: float, most: float) -> None:
    case = Case(optimizer, max_grad_norm=most)
    outcome = case.step(num_rows)
    mean = case.norm / num_rows
    assert float(outcome.grad_norm) == pytest.approx(mean, rel=1e-5), "the norm before clipping"
    share = min(1.0, most / mean) / num_rows
    found = moments(case)
    assert found.keys() == case.parameters.keys()
    for name, gradient in case.gradients.items():
        torch.testing.assert_close(found[name], gradient * share, rtol=1e-4, atol=1e-7)


def test_a_mean_at_its_limit_is_not_clipped() -> None:
    case = Case("adamw", max_grad_norm=2.0)
    scale = 2.0 / case.norm * 10
    case.step(10.0, scale)
    torch.testing.assert_close(moments(case)["fc.weight"], case.gradients["fc.weight"] * scale / 10)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_batch_without_a_row_changes_no_weight_and_counts(optimizer: str) -> None:
    case = Case(optimizer)
    before = case.weights
    outcome = case.step(num_rows=0.0, scale=0.0, loss=0.0)
    assert bool(outcome.taken)
    assert int(case.stepper.num_taken) == 1
    assert all(torch.equal(case.weights[name], before[name]) for name in before)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("what", ["loss", "adamw gradient", "muon gradient", "infinite gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_its_rate_is_used_by_the_next(
    optimizer: str, what: str
) -> None:
    case, other = Case(optimizer), Case(optimizer)
    case.step()
    other.step()
    before = case.weights
    name = "fc.weight" if what == "muon gradient" else "norm.weight"
    good = case.gradients[name].clone()
    if what != "loss":
        case.gradients[name].view(-1)[3] = float("inf" if "infinite" in what else "nan")
    outcome = case.step(loss=float("nan") if what == "loss" else 1.0)
    assert not bool(outcome.taken)
    assert int(case.stepper.num_taken) == 1
    assert all(torch.equal(case.weights[n], before[n]) for n in before)
    case.gradients[name] = good
    assert float(case.step().rate) == pytest.approx(case.rates[1])
    other.step()
    assert all(torch.equal(case.weights[n], other.weights[n]) for n in before), "no trace of it is left"


def test_a_head_that_is_not_trained_is_in_no_optimizer() -> None:
    case = Case("muon", train_head=False)
    before = case.weights
    case.step()
    assert torch.equal(case.weights["lm_head.weight"], before["lm_head.weight"])
    assert not torch.equal(case.weights["embed_tokens.weight"], before["embed_tokens.weight"])
