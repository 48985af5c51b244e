"""Of which version the records of a run folder are, and what is done with those of another one."""

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import UserError
from eyas.files import seal
from eyas.run_folder import FORMAT_VERSION, STAGES, begin_record, read_record, write_record


def write_old(folder: Path, stage: str, **changes: Any) -> None:
    """Write a finished record as eyas 0.1 did: without a version."""
    value = {"stage": stage, "eyas": "0.1.0", "inputs": {"a": 1}, "done": True, "output": "x"} | changes
    folder.mkdir(exist_ok=True)
    (folder / "stage.json").write_text(json.dumps(seal(value)))


def begin_again(folder: Path, stage: str, fresh: bool = False) -> Path | None:
    return begin_record(folder, stage, {"a": 1}, lambda: True, lambda *_: "why", again="", fresh=fresh)


def test_a_record_says_of_which_version_it_is(tmp_path: Path) -> None:
    write_record(tmp_path, "prepare", {"a": 1}, done=True, output="x")
    assert json.loads((tmp_path / "stage.json").read_text())["format"] == FORMAT_VERSION
    found = read_record(tmp_path)
    assert found is not None
    assert (found["inputs"], found["output"]) == ({"a": 1}, "x")


@pytest.mark.parametrize("stage", [s for s in STAGES if s not in ("extract", "export")])
def test_a_stage_of_0_1_is_refused_with_the_command_that_redoes_it(tmp_path: Path, stage: str) -> None:
    write_old(tmp_path, stage)
    with pytest.raises(UserError, match=r"was written by eyas 0\.1\.0; this version does not read") as caught:
        read_record(tmp_path)
    assert f"eyas {stage} -c <run file> --fresh" in str(caught.value.hint)
    with pytest.raises(UserError, match="does not read"):
        begin_again(tmp_path, stage)
    assert begin_again(tmp_path, stage, fresh=True)


@pytest.mark.parametrize("stage", ["extract", "export"])
def test_states_and_exports_of_0_1_are_read(tmp_path: Path, stage: str) -> None:
    write_old(tmp_path, stage)
    assert not begin_again(tmp_path, stage)


@pytest.mark.parametrize("version", [1, FORMAT_VERSION + 1, "2"])
@pytest.mark.parametrize("stage", ["prepare", "extract"])
def test_any_other_version_is_refused(tmp_path: Path, stage: str, version: Any) -> None:
    write_old(tmp_path, stage, format=version)
    with pytest.raises(UserError, match="this version does not read its run folders"):
        read_record(tmp_path)
