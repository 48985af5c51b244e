"""benchmarks/harness.py: what it gives to other trainers, and that it says the same twice."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas.config.load import load_config
from eyas.stages.run_context import RunContext
from harness_answers import Answers, Budget, choose
from harness_recipes import prepare_specforge
from pipeline import exported_run

HARNESS = Path(__file__).parents[2] / "benchmarks" / "harness.py"


@pytest.fixture(scope="module")
def run_file(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_run(tmp_path_factory.mktemp("harness"), tiny_target)


@pytest.fixture(scope="module")
def answers(run_file: Path) -> Answers:
    return Answers(run_file, RunContext(load_config(run_file)))


def run(run_file: Path, work: Path, *arguments: str) -> dict[str, Any]:
    words = [sys.executable, HARNESS, "run", run_file, "--recipe", "eyas", "--work", work, *arguments]
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_two_runs_with_the_same_seed_agree(run_file: Path, tmp_path: Path) -> None:
    first, second = (run(run_file, tmp_path, "--tokens", "2000", "--seeds", "3") for _ in range(2))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert first["held_out"]["3"]["length"] > 1


@pytest.mark.parametrize(("share", "epochs"), [(0.25, 1), (1.0, 1), (2.5, 3)])
def test_a_budget_is_met_with_whole_answers(answers: Answers, share: float, epochs: int) -> None:
    asked = int(share * sum(answers.lengths))
    chosen = choose(answers, Budget(asked))
    assert chosen.num_epochs == epochs
    assert abs(chosen.num_tokens * epochs - asked) <= max(answers.lengths) * epochs
    assert chosen.num_tokens == sum(answers.lengths[i] for i in chosen.indices)


def test_specforge_learns_from_the_state_of_the_next_position(answers: Answers, tmp_path: Path) -> None:
    chosen = choose(answers, Budget(sum(answers.lengths)))
    prepare_specforge(answers, chosen, tmp_path)
    head = load_file(tmp_path / "target" / "model.safetensors")["lm_head.weight"].float()
    agree, rows = 0, 0
    for path in (tmp_path / "states").iterdir():
        own = torch.load(path, weights_only=True)
        for row in own["loss_mask"].nonzero().flatten().tolist():
            assert own["hidden_state"][0, row + 1].any()
            teacher = int((head @ own["hidden_state"][0, row + 1].float()).argmax())
            # The answers are the target's own, greedy.
            if row + 2 < len(own["input_ids"]):
                agree += teacher == int(own["input_ids"][row + 2])
                rows += 1
    assert rows > 50
    assert agree / rows > 0.95
