"""What an evaluation has measured comes back as it was, and only under the same conditions."""

import json
from pathlib import Path

import pytest

from eyas.engines.base import Prompt
from eyas.engines.spec_decode_metrics import SpecCounters
from eyas.files import seal, write_json
from eyas.serving.recommend import ServingPoint
from eyas.serving.results import Group, ServingResults

CONDITIONS = {"vllm": "0.32.0", "settings": {"engine_args": []}, "machine": "here"}
NAN = float("nan")


def measured() -> ServingResults:
    point = ServingPoint(3, 0.0, 8, 2, 40, 99.5, 1.0, 2.0, None, (2.0, 2.5), [0.5, 0.25, 0.125])
    row = {"suite": "s", "category": "a", "num_draft_tokens": 3, "acceptance_length": None}
    singly = {"é/1": ((8, 9), SpecCounters(2, 1)), "2": ((), SpecCounters(0, None))}
    groups = [Group("held out", "all", [Prompt("é/1", (5, 6)), Prompt("2", (7,))]), Group("s", "a")]
    return ServingResults(
        groups, 1, [1, 3], [point], [row], drafted={(3, 8): {"é/1": (8, 9), "2": ()}}, singly=singly
    )


def test_what_was_measured_comes_back(tmp_path: Path) -> None:
    measured().save(tmp_path / "so-far.json", CONDITIONS)
    assert ServingResults.load(tmp_path / "so-far.json", CONDITIONS) == measured()


def test_other_conditions_or_a_damaged_file_measure_anew(tmp_path: Path) -> None:
    path = tmp_path / "so-far.json"
    assert ServingResults.load(path, CONDITIONS) is None
    measured().save(path, CONDITIONS)
    assert ServingResults.load(path, CONDITIONS | {"vllm": "0.33.0"}) is None
    text = path.read_text()
    for damaged in (
        text.replace("99.5", "98.5"),
        text[:-20],
        "[]",
        "{}",
        json.dumps({"conditions": CONDITIONS}),
        "",
    ):
        path.write_text(damaged)
        assert ServingResults.load(path, CONDITIONS) is None
    for change in ({"left_out": "1"}, {"points": [{}]}, {"categories": [{}]}, {"more": 1}):
        value = json.loads(text)
        write_json(path, seal({**value, "measured": value["measured"] | change}))
        assert ServingResults.load(path, CONDITIONS) is None, change


@pytest.mark.parametrize("length", [(NAN, NAN), (1.0, 1.5)])
def test_no_rounds_are_no_rounds_afterwards(tmp_path: Path, length: tuple[float, float]) -> None:
    one = measured()
    one.categories[0]["acceptance_length"] = length
    one.save(tmp_path / "a", CONDITIONS)
    found = ServingResults.load(tmp_path / "a", CONDITIONS)
    assert found is not None
    assert str(found.categories[0]["acceptance_length"]) == str(length)
