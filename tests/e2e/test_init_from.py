"""Training goes on from a draft that exists, whichever format it is in."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.export.read import read_draft
from eyas.train.checkpoint import best_checkpoint, read_checkpoint
from pipeline import eyas, write_run
from tiny import make_target


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    root = tmp_path_factory.mktemp("run")
    path = write_run(root, tiny_target, train={"num_epochs": 6, "learning_rate": 4e-3})
    for stage in ("prepare", "regenerate", "extract", "train", "export"):
        screen = eyas(stage, "-c", path)
        assert screen.code == 0, screen.err
    return path


def history(run_file: Path) -> list[dict[str, Any]]:
    record = json.loads((run_file.parent / "run" / "checkpoints" / "stage.json").read_text())
    return [row for row in record["history"] if not row.get("validation")]


@pytest.mark.parametrize("format", ["native", "speculators"])
def test_training_goes_on_from_an_exported_draft(tmp_path: Path, run_file: Path, format: str) -> None:
    assert eyas("export", "-c", run_file, f"export.format={format}", "--fresh").code == 0
    exported = Path(shutil.copytree(run_file.parent / "run" / "draft", tmp_path / "draft"))
    if format == "speculators":  # whose own trainer gives its drafts a window
        config = json.loads((exported / "config.json").read_text())
        config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"], "sliding_window": 12}
        (exported / "config.json").write_text(json.dumps(config))
    fresh_start = history(run_file)[0]["loss"]
    again = Path(shutil.copytree(run_file.parent, tmp_path / "again")) / "run.yaml"
    settings = (f"run_dir={again.parent / 'run'}", f"draft.init_from={exported}", "draft.vocab_size=60")
    screen = eyas("train", "-c", again, *settings, "train.learning_rate=1e-9", "--fresh")
    assert screen.code == 0, screen.err
    assert f"train: going on from {exported}" in screen.err
    assert ("it keeps its window of 12 tokens" in screen.err) == (format == "speculators")
    assert history(again)[0]["loss"] < 0.8 * fresh_start
    # With next to no learning rate what comes out is what went in, vocabulary included.
    best = best_checkpoint(again.parent / "run" / "checkpoints")
    assert best is not None
    stored = read_draft(exported)
    checkpoint = read_checkpoint(best)
    assert checkpoint.draft_config.sliding_window == (12 if format == "speculators" else None)
    assert checkpoint.vocab.target_ids.tolist() == stored.target_ids.tolist()
    from safetensors.torch import load_file

    trained = load_file(best / "draft.safetensors")
    for name, tensor in stored.tensors.items():
        torch.testing.assert_close(trained[name], tensor, atol=1e-5, rtol=0, msg=name)


def test_a_draft_of_other_layers_is_refused_before_anything_is_done(tmp_path: Path, run_file: Path) -> None:
    exported = run_file.parent / "run" / "draft"
    screen = eyas(
        "run", "-c", run_file, f"run_dir={tmp_path / 'new'}", f"draft.init_from={exported}",
        "target.aux_layer_ids=[1,4,5]",
    )  # fmt: skip
    assert screen.code == 2
    assert "reads aux layers [2, 4, 5], this run captures [1, 4, 5]" in screen.err
    assert "hint: set target.aux_layer_ids=[2, 4, 5]" in screen.err
    assert not (tmp_path / "new").exists()


def test_a_draft_of_another_target_is_refused(tmp_path: Path, run_file: Path) -> None:
    exported = run_file.parent / "run" / "draft"
    wide = make_target(tmp_path / "wide", hidden_size=64)
    screen = eyas("train", "-c", write_run(tmp_path, wide), f"draft.init_from={exported}")
    assert screen.code == 2
    assert "is for a target of 300 ids and width 32; this one has 300 and 64" in screen.err


def test_a_draft_that_is_not_there_is_refused(tmp_path: Path, run_file: Path) -> None:
    screen = eyas("train", "-c", run_file, f"draft.init_from={tmp_path / 'nowhere'}", "--fresh")
    assert screen.code == 2
    assert "hint: draft.init_from is a folder or a hub id owner/name" in screen.err
