"""Relative paths of a run file start at its folder, wherever the command is run."""

from pathlib import Path

import pytest

from eyas.config.explain import to_commented_yaml
from eyas.config.load import load_config

RUN_FILE = """\
run_dir: runs/a
base_run: runs/base
target: {model: models/mine}
data: {sources: [chats.jsonl, "parts/*.jsonl", {path: more.jsonl, weight: 0.5}, "hf:a/b:c", /abs.jsonl, "-"]}
draft: {init_from: owner/draft}
extract: {states_dir: "s3://bucket/run"}
evaluate: {benchmarks: [mt-bench, own.jsonl, ./absent.jsonl]}
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another folder than that of ../work/run.yaml, from which the command is run."""
    work = tmp_path / "work"
    (work / "models" / "mine").mkdir(parents=True)
    (work / "own.jsonl").write_text("")
    (work / "run.yaml").write_text(RUN_FILE)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


def test_a_path_in_a_run_file_starts_at_its_folder_and_a_name_stays_one(elsewhere: Path) -> None:
    config = load_config(Path("../work/run.yaml")).config
    assert config.run_dir == Path("../work/runs/a")
    assert config.base_run == Path("../work/runs/base")
    assert config.target.model == "../work/models/mine"
    assert [path for path, _ in config.data.weighted_sources] == [
        "../work/chats.jsonl",
        "../work/parts/*.jsonl",
        "../work/more.jsonl",
        "hf:a/b:c",
        "/abs.jsonl",
        "-",
    ]
    assert str(config.draft.init_from) == "owner/draft"
    assert str(config.extract.states_dir) == "s3://bucket/run"
    assert config.evaluate.benchmarks == ("mt-bench", "../work/own.jsonl", "../work/absent.jsonl")


def test_a_path_on_the_command_line_starts_at_the_current_folder(elsewhere: Path) -> None:
    config = load_config(Path("../work/run.yaml"), ("run_dir=mine", "data.sources=[here.jsonl]")).config
    assert (config.run_dir, config.data.sources) == (Path("mine"), ("here.jsonl",))


def test_the_file_in_a_run_folder_means_the_same_from_anywhere(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_config(Path("../work/run.yaml"), ("data.sources=[here.jsonl]",))
    run = loaded.config.run_dir
    (run / "prepared").mkdir(parents=True)
    (run / "prepared" / "stage.json").write_text("{}")
    (run / "run.yaml").write_text(to_commented_yaml(loaded, run))
    monkeypatch.chdir(elsewhere.parent / "work" / "models")
    config = load_config(Path("../runs/a/run.yaml")).config
    assert config.run_dir == Path("../runs/a")
    assert config.base_run == Path("../runs/base")
    assert config.target.model == "../models/mine"
    assert Path(config.data.sources[0]).resolve() == (elsewhere / "here.jsonl").resolve()
    assert config.evaluate.benchmarks == ("mt-bench", "../own.jsonl", "../absent.jsonl")


def test_the_file_that_version_0_1_left_in_a_run_folder_keeps_its_meaning(elsewhere: Path) -> None:
    run = Path("runs/a")
    (run / "prepared").mkdir(parents=True)
    (run / "prepared" / "stage.json").write_text("{}")
    (run / "run.yaml").write_text(RUN_FILE)
    config = load_config(run).config
    assert (config.run_dir, config.base_run) == (run, Path("runs/base"))
    assert config.data.weighted_sources[0][0] == "chats.jsonl"
