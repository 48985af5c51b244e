"""The README's commands do what the README says."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from eyas.cli import cli
from pipeline import eyas, write_run

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line.strip().split("  #")[0] for line in re.findall(r"^    eyas .*$", README, re.M)]


def test_the_readme_shows_commands() -> None:
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_a_command_of_the_readme_succeeds(
    number: int, tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = yaml.safe_load(re.search(r"```yaml\n(.*?)```", README, re.S).group(1))  # type: ignore[union-attr]
    small = yaml.safe_load(write_run(tmp_path, tiny_target).read_text())
    assert set(shown) == {"run_dir", "target", "data"}
    # The README's own file, with a target and data that are at hand and a size for tests.
    shown["target"]["model"], shown["data"]["sources"] = str(tiny_target), small["data"]["sources"]
    settings = small | {"run_dir": shown["run_dir"], "target": shown["target"]}
    settings["data"] = small["data"] | shown["data"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    screen = eyas(*shlex.split(COMMANDS[number])[1:])
    assert screen.code == 0, screen.err
    if " run " in COMMANDS[number]:
        assert (tmp_path / "runs/my-draft/draft/model.safetensors").is_file()
        assert (tmp_path / "runs/my-draft/report.html").is_file()


def test_every_command_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"`eyas ([a-z-]+)", README))
    assert named
    assert named <= set(cli.commands)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"^    make (\w+)$", README, re.M))))
def test_a_make_target_of_the_readme_exists(target: str) -> None:
    subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)
