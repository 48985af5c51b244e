"""``eyas train`` on two processes that it starts itself."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pipeline import eyas, write_run

SHARED = ("train.batches_per_step=2", "train.batch_tokens=128", "train.num_epochs=2", "train.optimizer=adamw")


@pytest.fixture(scope="module")
def extracted(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extracted")
    run_file = write_run(folder, tiny_target)
    for stage in ("prepare", "regenerate", "extract"):
        assert eyas(stage, "-c", run_file).code == 0
    return run_file


def trained(run_file: Path, *settings: str) -> tuple[dict, dict]:  # type: ignore[type-arg]
    """Train from the start and return the stage's record and the last weights."""
    checkpoints = run_file.parent / "run" / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    screen = eyas("train", "-c", run_file, *SHARED, *settings)
    assert screen.code == 0, screen.err
    last = max(checkpoints.glob("step-*"))
    return json.loads((checkpoints / "stage.json").read_text()), load_file(last / "draft.safetensors")


def test_two_processes_train_what_one_trains_and_only_the_first_of_them_speaks(
    extracted: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record, weights = trained(extracted)
    capfd.readouterr()
    record_two, weights_two = trained(extracted, "train.num_gpus=2")
    said = capfd.readouterr().err
    assert said.count("best validation acceptance length") == 1
    assert record_two["inputs"] == record["inputs"]
    assert record_two["acceptance_length"] == record["acceptance_length"]
    assert all((weights[n] - weights_two[n]).abs().max() < 1e-5 for n in weights)
    record_sliced, weights_sliced = trained(extracted, "train.num_gpus=2", "train.shard=true")
    assert record_sliced["inputs"] == record["inputs"]
    assert all((weights[n] - weights_sliced[n]).abs().max() < 1e-5 for n in weights)


def test_a_mistake_is_told_before_any_process_is_started(extracted: Path) -> None:
    screen = eyas("train", "-c", extracted, "train.num_gpus=3", "train.batches_per_step=2", "--fresh")
    assert screen.code == 2
    assert "train.batches_per_step=3" in screen.err
    screen = eyas("train", "-c", extracted, "train.shard=true", "train.optimizer=muon", "--fresh")
    assert screen.code == 2
    assert "needs whole matrices" in screen.err
    assert "train.optimizer=adamw" in screen.err
