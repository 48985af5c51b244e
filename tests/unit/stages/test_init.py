"""eyas init: a run file that is valid, says why, and suits the machine."""

import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from eyas.config.load import load_config
from eyas.errors import UserError
from eyas.stages.init import init


def test_a_file_for_a_cpu_and_one_for_gpus_are_valid_and_differ(tmp_path: Path) -> None:
    init("demo:smollm2-135m-instruct", ["a.jsonl", "b.jsonl"], 0, None, tmp_path / "cpu.yaml")
    init("meta-llama/Llama-3.1-8B-Instruct", ["a.jsonl"], 4, "runs/mine", tmp_path / "gpu.yaml")
    cpu, gpu = (load_config(tmp_path / name).config for name in ("cpu.yaml", "gpu.yaml"))
    # What is given starts here, and so it does in the file, which lies elsewhere.
    assert cpu.run_dir == tmp_path / "runs/smollm2-135m-instruct"
    assert gpu.run_dir == Path("runs/mine").absolute()
    assert cpu.data.sources == tuple(str(Path(name).absolute()) for name in ("a.jsonl", "b.jsonl"))
    assert (cpu.extract.engine, gpu.extract.engine) == ("transformers", "vllm")
    assert (gpu.vllm.tensor_parallel_size, gpu.train.num_gpus) == (1, 4), (
        "the size of the target is not known here"
    )
    assert gpu.train.compute_dtype == "bfloat16"
    # What is decoded must be known: answers are at least as long.
    assert all(c.evaluate.max_new_tokens <= c.regenerate.max_new_tokens for c in (cpu, gpu))
    text = (tmp_path / "gpu.yaml").read_text()
    assert text.count("#") > 8, "settings are explained"


def test_names_with_quotes_and_spaces_are_kept(tmp_path: Path) -> None:
    init('/models/my "model"', ["my data.jsonl"], 0, None, tmp_path / "run.yaml")
    config = load_config(tmp_path / "run.yaml").config
    assert config.target.model == '/models/my "model"'
    assert config.data.sources == (str(Path("my data.jsonl").absolute()),)


def test_what_is_missing_is_asked_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(question: str, default: str | None = None, err: bool = False) -> str:
        asked.append(question)
        return default or "answer"

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(click, "prompt", answer)
    init(None, [], None, None, tmp_path / "run.yaml")
    assert [q.split()[0] for q in asked] == ["Which", "Where", "How"]
    assert load_config(tmp_path / "run.yaml").config.target.model == "answer"


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        init("m", ["d"], 0, None, tmp_path / "run.yaml")
    assert (tmp_path / "run.yaml").read_text() == "mine"


@pytest.mark.parametrize(("gigabytes", "tp"), [(16, 1), (140, 4), (1000, 8)])
def test_eight_gpus_are_used_for_training_and_as_many_as_needed_hold_a_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gigabytes: float, tp: int
) -> None:
    size = SimpleNamespace(weight_bytes=gigabytes * 1e9)
    monkeypatch.setattr("eyas.plan.parallel.read_target_size", lambda settings: size)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    init("some/model", ["chats.jsonl"], 8, None, tmp_path / "run.yaml")
    config = load_config(tmp_path / "run.yaml").config
    assert (config.train.num_gpus, config.train.batches_per_step) == (8, 8)
    assert config.vllm.tensor_parallel_size == tp


def test_a_target_that_is_not_here_gets_one_gpu_a_copy(tmp_path: Path) -> None:
    init("some/model", ["chats.jsonl"], 8, None, tmp_path / "run.yaml")
    assert load_config(tmp_path / "run.yaml").config.vllm.tensor_parallel_size == 1
    assert "its size is not known here" in (tmp_path / "run.yaml").read_text()
