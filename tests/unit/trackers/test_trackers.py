"""Adapters of experiment trackers: the real TensorBoard, and the others' interfaces stood in for."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from eyas import registry
from eyas.errors import UserError
from eyas.trackers.base import Trackers, figures_of

TRAIN = {"step": 3, "learning_rate": 1e-3, "grad_norm": 2.0, "loss": 1.5, "agreement": [0.5, 0.25]}
CHECK = {"step": 4, "validation": True, "acceptance_length": 1.7, "acceptance_rates": [0.5, 0.2], "loss": 1.4}
SETTINGS = {"train.num_epochs": 3, "data.sources": ["a.jsonl"]}


def test_rows_become_flat_figures_on_their_side() -> None:
    assert figures_of(TRAIN) == {
        "train/learning_rate": 1e-3, "train/grad_norm": 2.0, "train/loss": 1.5,
        "train/agreement_1": 0.5, "train/agreement_2": 0.25,
    }  # fmt: skip
    assert figures_of(CHECK)["held_out/acceptance_rate_2"] == 0.2
    assert figures_of({"step": 9, "taken": False, "sample_ids": ["x"]}) == {}


class Fake(types.ModuleType):
    """Any of the packages: notes what it is told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any, **named: Any) -> "Fake":
            self.calls.append((name, arguments, named))
            return self

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(a, n) for called, a, n in self.calls if called == name]


@pytest.fixture(params=["wandb", "mlflow", "trackio"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fake:
    module = Fake(request.param)
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def test_settings_figures_and_the_end_reach_each_tracker(fake: Fake, tmp_path: Path) -> None:
    with Trackers((fake.__name__,), tmp_path / "my-run", SETTINGS) as trackers:
        trackers.log(TRAIN)
        trackers.log(CHECK)
    figures = fake.named("log_metrics" if fake.__name__ == "mlflow" else "log")
    assert [n["step"] for _, n in figures] == [3, 4]
    assert figures[0][0][0]["train/loss"] == 1.5
    assert figures[1][0][0]["held_out/acceptance_length"] == 1.7
    assert "my-run" in str(fake.calls[0])
    assert "train.num_epochs" in str(fake.calls)
    assert len(fake.named("end_run" if fake.__name__ == "mlflow" else "finish")) == 1


def test_a_run_that_failed_is_closed_as_failed(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Trackers((fake.__name__,), tmp_path, SETTINGS):
        raise ZeroDivisionError
    last = fake.calls[-1]
    assert last[0] in ("finish", "end_run")
    if fake.__name__ != "trackio":
        assert "FAILED" in last[1] or last[2] == {"exit_code": 1}


def test_tensorboard_files_hold_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Trackers(("tensorboard",), tmp_path, SETTINGS) as trackers:
        trackers.log(TRAIN)
        trackers.log(TRAIN | {"step": 5, "loss": 1.25})
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    losses = read.Scalars("train/loss")
    assert [(x.step, x.value) for x in losses] == [(3, 1.5), (5, 1.25)]


@pytest.mark.parametrize("name", sorted(registry.TRACKERS))
def test_a_tracker_that_is_not_installed_is_refused_with_the_remedy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=f"needs the package {name}") as caught:
        Trackers((name,), tmp_path, SETTINGS)
    assert "eyas[trackers]" in str(caught.value.hint)
