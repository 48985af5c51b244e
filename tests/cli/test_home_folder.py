"""``~`` is the home folder wherever a path is read, and no folder of that name appears."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from eyas.config.load import load_config
from eyas.config.paths import PATH_SETTINGS, expand_home
from eyas.config.schema import RunConfig
from eyas.errors import UserError
from pipeline import eyas, write_prompts, write_run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder; the command runs in another one."""
    folder, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(elsewhere)
    yield folder
    assert not [p for p in elsewhere.rglob("*") if p.name.startswith("~")]


def path_fields(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, info in model.model_fields.items():
        kind: Any = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys += path_fields(kind, f"{prefix}{name}.")
        elif "Path" in str(kind) or "folder" in (info.description or "").split("default")[0]:
            keys.append(prefix + name)
    return keys


def test_every_setting_that_is_a_path_or_may_name_a_folder_is_expanded() -> None:
    # trust_remote_code speaks of the model folder and is no path.
    assert set(path_fields(RunConfig)) - {"target.trust_remote_code"} <= set(PATH_SETTINGS)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("run_dir", "~/runs/x"),
        ("target.model", "~/models/m"),
        ("data.sources", "[~/chats/*.jsonl, hf:o/n:train, {path: ~/more, weight: 0.5}]"),
        ("data.sources", "~/chats"),
        ("extract.prepared_data", "~/other/prepared"),
        ("extract.states_dir", "~/states"),
        ("vllm.staging_dir", "~/staging"),
        ("draft.init_from", "~/drafts/d"),
        ("evaluate.benchmarks", "[mt-bench, ~/mine.jsonl]"),
    ],
)
@pytest.mark.parametrize("in_file", [False, True])
def test_a_setting_is_expanded_from_the_file_and_the_command_line(
    home: Path, setting: str, value: str, in_file: bool
) -> None:
    words = ["run_dir=r", "target.model=m", "data.sources=[a.jsonl]", f"{setting}={value}"]
    path = None
    if in_file:
        path = home / "run.yaml"
        section, _, leaf = setting.rpartition(".")
        path.write_text(f"{section}: {{{leaf}: {value}}}\n" if section else f"{leaf}: {value}\n")
        words = [w for w in words[:3] if not w.startswith(f"{setting}=")]
    found: Any = load_config(path, tuple(words)).config
    for part in setting.split("."):
        found = getattr(found, part)
    assert "~" not in str(found)
    assert str(home) in str(found)


def test_what_is_no_path_keeps_its_tilde(home: Path) -> None:
    words = ("run_dir=r", "target.model=m", "data.sources=[a]", "data.template_kwargs={x: ~/x}")
    assert load_config(None, words).config.data.template_kwargs == {"x": "~/x"}


def test_a_home_folder_that_does_not_exist_is_refused(home: Path) -> None:
    with pytest.raises(UserError, match="~nobody-here/x names a home folder that does not exist"):
        expand_home("~nobody-here/x")
    screen = eyas("config", "run_dir=~nobody-here/x", "target.model=m", "data.sources=[a]")
    assert screen.code == 2
    assert screen.err.startswith("error: ~nobody-here/x names a home folder")
    assert eyas("config", "-c", "~nobody-here/run.yaml").code == 2


def test_environment_variables_are_not_read(home: Path) -> None:
    found = load_config(None, ("run_dir=$HOME/x", "target.model=m", "data.sources=[a]")).config
    assert str(found.run_dir) == "$HOME/x"


def test_a_run_in_the_home_folder_by_paths_on_the_command_line(home: Path, tiny_target: Path) -> None:
    shutil.copytree(tiny_target, home / "model")
    write_prompts(home / "prompts.jsonl")
    run_file = write_run(home, Path("~/model"), run_dir="~/runs/x")
    assert run_file == home / "run.yaml"
    assert eyas("prepare", "--config=~/run.yaml", "data.sources=[~/prompts.jsonl]").code == 0
    assert (home / "runs/x/prepared").is_dir()
    assert eyas("plan", "-c", "~/run.yaml", "--no-calibrate", "--tokens", "1000").code == 0
    screen = eyas("init", "--target", "~/model", "--data", "~/prompts.jsonl", "--gpus", "0",
                  "--run-dir", "~/runs/y", "-o", "~/new.yaml")  # fmt: skip
    assert screen.code == 0, screen.err
    assert f'"{home}/runs/y"' in (home / "new.yaml").read_text()


def test_folders_named_to_serve_and_compare_are_expanded(home: Path) -> None:
    for arguments in (("serve", "~/draft"), ("compare", "~/a", "~/b")):
        screen = eyas(*arguments)
        assert screen.code == 2
        assert str(home) in screen.err
        assert "~" not in screen.err
    assert os.listdir(home) == []
