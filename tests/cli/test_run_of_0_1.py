"""A run folder of eyas 0.1: its states and its draft are used, all else is redone when asked."""

import json
from pathlib import Path

import pytest

from eyas.files import seal
from eyas.run_folder import FOLDERS
from pipeline import eyas, snapshot, write_run


@pytest.fixture(scope="module")
def old_run(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a finished run whose records have no version, as those of 0.1."""
    folder = tmp_path_factory.mktemp("old")
    run_file = write_run(folder, tiny_target)
    assert eyas("run", "-c", run_file).code == 0
    for name in FOLDERS.values():
        path = folder / "run" / name / "stage.json"
        record = json.loads(path.read_text())
        del record["format"], record["seal"]
        path.write_text(json.dumps(seal(record)))
    return run_file


@pytest.mark.parametrize("command", ["run", "prepare", "train", "status", "plan"])
def test_what_reads_more_than_states_and_drafts_is_refused_and_changes_nothing(
    old_run: Path, command: str
) -> None:
    before = snapshot(old_run.parent / "run")
    screen = eyas(command, "-c", old_run)
    assert screen.code == 2
    assert "this version does not read its run folders" in screen.err
    assert "hint: redo it: eyas " in screen.err
    assert snapshot(old_run.parent / "run") == before


def test_the_draft_of_0_1_is_served(old_run: Path) -> None:
    screen = eyas("serve", old_run.parent / "run" / "draft", "--print")
    assert screen.code == 0, screen.err


def test_states_of_0_1_are_kept_when_the_other_stages_are_redone(old_run: Path) -> None:
    states = old_run.parent / "run" / "states"
    before = snapshot(states)
    for stage in ("prepare", "regenerate"):
        assert eyas(stage, "-c", old_run, "--fresh").code == 0
    screen = eyas("extract", "-c", old_run)
    assert "extract: already done" in screen.err
    assert eyas("train", "-c", old_run, "--fresh").code == 0
    assert snapshot(states) == before
