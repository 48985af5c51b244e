"""The training loop: steps that are not finite, micro-batches, and the same run on a GPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eyas.config.schema import TrainSettings
from eyas.drafters.eagle3.objective import FusedObjective
from eyas.errors import ContractError
from eyas.train.checkpoint import latest_checkpoint, read_checkpoint
from eyas.train.precision import compute_dtype
from eyas.types import HiddenStates
from rank_cases import trainer_of, weights
from train_cases import make_case

LENGTHS = (20, 31, 17, 24, 29, 16, 22, 27)


def poisoned(states: HiddenStates) -> HiddenStates:
    return HiddenStates(states.sample, torch.full_like(states.aux, float("nan")), states.last)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_that_is_not_finite_is_not_taken_and_its_samples_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, optimizer: str
) -> None:
    case = make_case(0, LENGTHS)
    states = case.states
    states[3] = poisoned(states[3])
    trainer = trainer_of(case, tmp_path, states, optimizer=optimizer)
    with caplog.at_level("INFO", logger="eyas"):
        trainer.run()
    skipped = [row for row in trainer.history if row.get("taken") is False]
    assert [row["sample_ids"] for row in skipped] == [["s3"]]
    assert "s3" in caplog.text
    assert int(trainer.stepper.num_taken) == len(trainer.batches) - 1
    assert all(torch.isfinite(p).all() for p in weights(trainer).values())
    # The learning rate advanced with the steps taken, not with the batches read.
    rates = [row["learning_rate"] for row in trainer.history if "learning_rate" in row]
    assert rates == pytest.approx(trainer.stepper.rates[: len(rates)].tolist())


def test_three_steps_in_a_row_that_are_not_finite_stop_the_run_with_the_last_checkpoint_intact(
    tmp_path: Path,
) -> None:
    case = make_case(0, LENGTHS)
    first = trainer_of(case, tmp_path, case.states)
    order = [i for step in first.batches for batch in step for i in batch]
    states = case.states
    for place in order[4:7]:
        states[place] = poisoned(states[place])
    trainer = trainer_of(case, tmp_path, states, save_every=4)
    with pytest.raises(ContractError, match="3 steps in a row") as caught:
        trainer.run()
    assert states[order[6]].sample.sample_id in str(caught.value)
    folder = latest_checkpoint(tmp_path)
    assert folder is not None
    assert read_checkpoint(folder).step == 4


def test_micro_batches_add_up_to_one_batch(tmp_path: Path) -> None:
    """Two batches of one document each, divided once by their rows together, are a batch of both."""
    results = []
    for name, settings in (
        ("one", {"batch_tokens": 64}),
        ("two", {"batch_tokens": 33, "batches_per_step": 2}),
    ):
        case = make_case(6, (31, 33))
        trainer = trainer_of(case, tmp_path / name, case.states, **settings)
        assert len(trainer.batches) == 1
        trainer.run()
        results.append((weights(trainer), trainer.history[0]["loss"], trainer.history[0]["grad_norm"]))
    (one, one_loss, one_norm), (two, two_loss, two_norm) = results
    assert two_loss == pytest.approx(one_loss, rel=1e-6)
    assert two_norm == pytest.approx(one_norm, rel=1e-5)
    assert all(torch.allclose(one[n], two[n], atol=1e-6) for n in one)


def test_a_gpu_computes_in_bf16_and_a_cpu_in_fp32_unless_told_otherwise() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert compute_dtype(TrainSettings(), cpu) == torch.float32
    assert compute_dtype(TrainSettings(), cuda) == torch.bfloat16
    assert compute_dtype(TrainSettings(compute_dtype="float32"), cuda) == torch.float32


@pytest.mark.parametrize("loss", ["kl", "lk", "hybrid"])
def test_every_loss_falls(tmp_path: Path, loss: str) -> None:
    case = make_case(7, LENGTHS)
    trainer = trainer_of(
        case, tmp_path, case.states, loss=loss, num_epochs=12, batch_tokens=128, learning_rate=3e-3
    )
    trainer.run()
    losses = [row["loss"] for row in trainer.history if "grad_norm" in row]
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])


def test_the_average_of_the_weights_is_validated_and_kept_while_training_goes_on(tmp_path: Path) -> None:
    runs = []
    for name, decay in (("plain", None), ("averaged", 0.5)):
        case = make_case(7, LENGTHS)
        runs.append(trainer_of(case, tmp_path / name, case.states, ema_decay=decay, learning_rate=1e-2))
        runs[-1].run()
    plain, averaged = runs
    assert all(
        torch.equal(a, b) for a, b in zip(weights(plain).values(), weights(averaged).values(), strict=True)
    )
    expected: dict[str, torch.Tensor] = {}
    replayed = trainer_of(make_case(7, LENGTHS), tmp_path / "steps", case.states, learning_rate=1e-2)
    for step in range(len(replayed.batches) + 1):
        share = 1 - min(0.5, step / (9 + step)) if step else 1
        for name, weight in weights(replayed).items():
            expected[name] = weight if not step else expected[name].lerp(weight, share)
        replayed.run(stop_after=1)
    folder = latest_checkpoint(tmp_path / "averaged")
    assert folder is not None
    kept = load_file(folder / "draft.safetensors")
    assert all(torch.allclose(kept[name], expected[name], atol=1e-6) for name in expected)
    assert averaged.history[-1]["loss"] != plain.history[-1]["loss"]  # the last entry is the validation


def test_muon_trains_and_a_head_that_is_not_trained_stays(tmp_path: Path) -> None:
    case = make_case(7, LENGTHS)
    head = case.draft.lm_head.weight.detach().clone()
    settings = {"num_epochs": 12, "batch_tokens": 128, "learning_rate": 3e-3}
    trainer = trainer_of(case, tmp_path, case.states, optimizer="muon", train_head=False, **settings)
    trainer.run()
    losses = [row["loss"] for row in trainer.history if "grad_norm" in row]
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])
    assert torch.equal(case.draft.lm_head.weight, head)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("optimizer", "train_head"), [("adamw", True), ("adamw", False), ("muon", True)])
def test_a_run_on_a_gpu_is_the_run_on_the_cpu(tmp_path: Path, optimizer: str, train_head: bool) -> None:
    histories = []
    for device in ("cpu", "cuda"):
        case = make_case(8, LENGTHS, head_dim=16)
        settings: dict[str, Any] = {"num_epochs": 3, "validate_every": 5, "compute_dtype": "float32"}
        settings |= {"optimizer": optimizer, "train_head": train_head}
        trainer = trainer_of(case, tmp_path / device, case.states, device, **settings)
        assert isinstance(trainer.objective, FusedObjective) == (device == "cuda")
        trainer.run()
        histories.append(trainer.history)
    loose = 10 if optimizer == "muon" else 1  # it orthogonalises in bf16
    for cpu, gpu in zip(*histories, strict=True):
        assert gpu["loss"] == pytest.approx(cpu["loss"], rel=loose * 1e-3)
        assert gpu.get("grad_norm") == pytest.approx(cpu.get("grad_norm"), rel=loose * 1e-2)
