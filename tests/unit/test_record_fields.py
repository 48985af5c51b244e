"""The record of a stage is read only as it was written."""

from pathlib import Path
from typing import Any

import pytest

from eyas.errors import ContractError
from eyas.files import seal, write_json
from eyas.run_folder import FORMAT_VERSION, read_record

BEGUN = {"stage": "train", "format": FORMAT_VERSION, "inputs": {"a": 1}, "done": False}
WHOLE = BEGUN | {"done": True, "output": "f", "seconds": 1.5}


def test_a_record_comes_back_with_the_facts_of_its_stage(tmp_path: Path) -> None:
    write_json(tmp_path / "stage.json", seal(WHOLE | {"best_step": 3}))
    assert read_record(tmp_path) == WHOLE | {"best_step": 3}


def test_a_stage_that_has_not_finished_has_no_output_yet(tmp_path: Path) -> None:
    write_json(tmp_path / "stage.json", seal(BEGUN))
    assert read_record(tmp_path) == BEGUN
    assert read_record(tmp_path / "elsewhere") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"done": "yes"}, "done: Input should be a valid boolean, not 'yes'"),
        ({"inputs": []}, "inputs: Input should be an object, not \\[\\]"),
        ({"seconds": "1"}, "seconds: Input should be a valid number, not '1'"),
    ],
)
def test_a_record_with_a_field_of_another_type_is_damaged(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    write_json(tmp_path / "stage.json", seal(WHOLE | change))
    with pytest.raises(ContractError, match=f"stage.json is damaged: {words}") as caught:
        read_record(tmp_path)
    assert caught.value.hint == "redo the stage with --fresh"


@pytest.mark.parametrize("name", ["inputs", "done"])
def test_a_record_without_a_field_is_damaged(tmp_path: Path, name: str) -> None:
    write_json(tmp_path / "stage.json", seal({k: v for k, v in WHOLE.items() if k != name}))
    with pytest.raises(ContractError, match=f"it has other fields: .'{name}'"):
        read_record(tmp_path)
