"""Training that was interrupted goes on as if it had not been."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.errors import ContractError
from eyas.train import loop
from eyas.train.checkpoint import best_checkpoint, latest_checkpoint, read_checkpoint
from eyas.train.loop import Trainer
from eyas.types import HiddenStates
from tiny import answered_states, make_trainer

NUM_STEPS = 6


@pytest.fixture(scope="module")
def states(tiny_engine: Any) -> list[HiddenStates]:
    return answered_states(tiny_engine, 20, 24, seed=1)


@pytest.fixture
def new_trainer(tiny_target: Path, states: list[HiddenStates]) -> Any:
    def make(root: Path, **settings: Any) -> Trainer:
        return make_trainer(root, tiny_target, states[:14], states[14:], **settings)

    return make


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return weights and optimizer state by name."""
    values = {name: p.detach().clone() for name, p in trainer.draft.named_parameters()}
    for name, parameter in trainer.draft.trainable().items():
        for optimizer in trainer.optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                values[f"{name}:{key}"] = value.clone()
    return values


def assert_bit_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.fixture(scope="module")
def uninterrupted(
    tiny_target: Path, states: list[HiddenStates], tmp_path_factory: pytest.TempPathFactory
) -> Trainer:
    root = tmp_path_factory.mktemp("whole")
    trainer = make_trainer(root, tiny_target, states[:14], states[14:], validate_every=3, save_every=2)
    assert len(trainer.batches) == NUM_STEPS
    trainer.run()
    return trainer


@pytest.mark.parametrize("stop_after", range(1, NUM_STEPS))
def test_a_run_stopped_after_any_step_and_resumed_has_the_same_bits(
    tmp_path: Path, new_trainer: Any, uninterrupted: Trainer, stop_after: int
) -> None:
    new_trainer(tmp_path, validate_every=3, save_every=2).run(stop_after=stop_after)
    resumed = new_trainer(tmp_path, validate_every=3, save_every=2)
    resumed.run()
    assert_bit_equal(everything(resumed), everything(uninterrupted))
    assert resumed.history == uninterrupted.history
    assert resumed.best == uninterrupted.best
    assert best_checkpoint(tmp_path).name == best_checkpoint(uninterrupted.root).name  # type: ignore[union-attr]


def test_two_optimizers_and_an_average_resume_with_the_same_bits(tmp_path: Path, new_trainer: Any) -> None:
    settings = {"optimizer": "muon", "train_head": False, "ema_decay": 0.9, "save_every": 2}
    whole = new_trainer(tmp_path / "whole", **settings)
    whole.run()
    new_trainer(tmp_path / "parts", **settings).run(stop_after=3)
    resumed = new_trainer(tmp_path / "parts", **settings)
    resumed.run()
    assert_bit_equal(everything(resumed), everything(whole))
    assert resumed.average is not None
    assert whole.average is not None
    assert_bit_equal(resumed.average.averages, whole.average.averages)
    assert "layers.0.mlp.up_proj.weight:momentum_buffer" in everything(resumed)


class Crash(RuntimeError):
    pass


@pytest.mark.parametrize("crash_at", [1, 3, 5])
def test_a_crash_between_checkpoints_loses_only_the_steps_since_the_last(
    tmp_path: Path, new_trainer: Any, uninterrupted: Trainer, crash_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashing = new_trainer(tmp_path, validate_every=3, save_every=2)
    step = crashing._step
    calls = 0

    def crash_later(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > crash_at:
            raise Crash
        return step(*arguments)

    monkeypatch.setattr(crashing, "_step", crash_later)
    with pytest.raises(Crash):
        crashing.run()
    resumed = new_trainer(tmp_path, validate_every=3, save_every=2)
    resumed.run()
    assert_bit_equal(everything(resumed), everything(uninterrupted))
    assert resumed.history == uninterrupted.history


def test_a_crash_before_the_best_checkpoint_is_marked_loses_no_mark(
    tmp_path: Path, new_trainer: Any, uninterrupted: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*arguments: Any) -> None:
        raise Crash

    monkeypatch.setattr(loop, "mark_best", crash)
    with pytest.raises(Crash):
        new_trainer(tmp_path, validate_every=3, save_every=2).run()
    monkeypatch.undo()
    resumed = new_trainer(tmp_path, validate_every=3, save_every=2)
    resumed.run()
    best = best_checkpoint(tmp_path)
    assert best is not None
    assert read_checkpoint(best).step == resumed.best_step == uninterrupted.best_step


def test_a_finished_run_does_nothing_more(tmp_path: Path, new_trainer: Any, uninterrupted: Trainer) -> None:
    new_trainer(tmp_path, validate_every=3, save_every=2).run()
    again = new_trainer(tmp_path, validate_every=3, save_every=2)
    again.run()
    assert_bit_equal(everything(again), everything(uninterrupted))
    assert again.history == uninterrupted.history


def test_the_last_and_the_best_checkpoint_are_kept_and_no_other(uninterrupted: Trainer) -> None:
    root = uninterrupted.root
    kept = {p.name for p in root.glob("step-*")}
    best, last = best_checkpoint(root), latest_checkpoint(root)
    assert best is not None
    assert last is not None
    assert kept == {best.name, last.name}
    assert last.name == f"step-{NUM_STEPS:06d}"
    assert not [p for p in root.iterdir() if p.name.startswith(".")]


def test_a_checkpoint_holds_fp32_masters_and_moments(uninterrupted: Trainer) -> None:
    from safetensors.torch import load_file

    folder = latest_checkpoint(uninterrupted.root)
    assert folder is not None
    weights, moments = (load_file(folder / f"{name}.safetensors") for name in ("draft", "optimizer"))
    assert set(weights) == set(uninterrupted.draft.trainable())
    assert {t.dtype for t in (weights | moments).values()} == {torch.float32}
    assert len(moments) == 3 * len(weights)


@pytest.mark.parametrize("name", ["draft.safetensors", "optimizer.safetensors", "vocab.safetensors"])
def test_a_damaged_checkpoint_is_refused_by_the_name_of_its_file(
    tmp_path: Path, new_trainer: Any, name: str
) -> None:
    new_trainer(tmp_path).run(stop_after=1)
    folder = latest_checkpoint(tmp_path)
    assert folder is not None
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(ContractError, match=f"{name} is damaged"):
        new_trainer(tmp_path).run()


def test_a_folder_without_its_description_is_not_a_checkpoint(tmp_path: Path, new_trainer: Any) -> None:
    (tmp_path / "step-000099").mkdir()
    assert latest_checkpoint(tmp_path) is None
    new_trainer(tmp_path).run(stop_after=1)
    assert read_checkpoint(tmp_path / "step-000001").step == 1


@pytest.mark.parametrize("change", [{"learning_rate": 1e-4}, {"batch_tokens": 100}, {"vocab_size": 60}])
def test_training_refuses_to_go_on_with_other_settings(
    tmp_path: Path, new_trainer: Any, change: dict[str, Any]
) -> None:
    new_trainer(tmp_path).run(stop_after=1)
    with pytest.raises(ContractError, match="other settings or other states"):
        new_trainer(tmp_path, **change).run()


def test_training_refuses_to_go_on_with_other_states(
    tmp_path: Path, new_trainer: Any, tiny_target: Path, states: list[HiddenStates]
) -> None:
    new_trainer(tmp_path).run(stop_after=1)
    with pytest.raises(ContractError, match="other settings or other states"):
        make_trainer(tmp_path, tiny_target, states[:13], states[14:]).run()


def test_the_first_losses_of_a_seeded_run_are_what_they_were(uninterrupted: Trainer) -> None:
    losses = [row["loss"] for row in uninterrupted.history if not row.get("validation")]
    assert losses[:4] == pytest.approx(PINNED, rel=1e-3)


# KL in nats, summed over the weighted steps, per supervised row. A change here is a change of the maths.
PINNED = [1.08532, 1.26680, 1.75209, 1.17621]


def test_metrics_are_lines_of_json(uninterrupted: Trainer) -> None:
    lines = (uninterrupted.root / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == uninterrupted.history


@pytest.mark.parametrize("stop_after", [2, 4, NUM_STEPS])
def test_a_resume_keeps_the_last_and_the_best_checkpoint_and_no_other_also_with_no_steps_left(
    tmp_path: Path, new_trainer: Any, stop_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill between the rename of a checkpoint and the removal of the one that it supersedes."""
    monkeypatch.setattr(loop, "prune", lambda root: None)
    new_trainer(tmp_path, validate_every=3, save_every=1).run(stop_after=stop_after)
    monkeypatch.undo()
    assert len(list(tmp_path.glob("step-*"))) == stop_after
    new_trainer(tmp_path, validate_every=3, save_every=1).run(stop_after=0)
    best, last = best_checkpoint(tmp_path), latest_checkpoint(tmp_path)
    assert last is not None
    assert last.name == f"step-{stop_after:06d}"
    kept = {last.name, best.name} if best else {last.name}
    assert {p.name for p in tmp_path.glob("*step-*")} == kept


def test_a_kill_while_a_checkpoint_is_removed_leaves_none_that_is_damaged(
    tmp_path: Path, new_trainer: Any, uninterrupted: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def killed(folder: Path, **options: Any) -> None:
        if not folder.name.endswith("tmp") and folder.is_dir():
            (folder / "draft.safetensors").unlink()
            raise Crash
        remove(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Crash):
        new_trainer(tmp_path, validate_every=3, save_every=2).run()
    monkeypatch.undo()
    resumed = new_trainer(tmp_path, validate_every=3, save_every=2)
    resumed.run()
    assert_bit_equal(everything(resumed), everything(uninterrupted))
