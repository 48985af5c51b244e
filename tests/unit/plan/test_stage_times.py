"""How long a stage takes: at the best known rate, and only for what is left of it."""

from pathlib import Path

import pytest

from eyas.errors import UserError
from eyas.plan.measure_rates import MeasuredRates
from eyas.plan.stage_times import Rates, StagePlan, given_rates, stage_plan, with_captures
from eyas.run_folder import write_record

MEASURED = MeasuredRates(rates={"extract": 10.0}, fixed_s={"extract": 3.0, "export": 7.0})


def test_a_given_rate_comes_before_an_earlier_and_a_measured_one(tmp_path: Path) -> None:
    for rates, seconds in (
        (Rates({"extract": 50.0}, {"extract": (25.0, "old")}, MEASURED), 2),
        (Rates({}, {"extract": (25.0, "old")}, MEASURED), 4),
        (Rates({}, {}, MEASURED), 10 + 3),
    ):
        assert stage_plan(tmp_path, "extract", "to do", 100, rates).seconds == seconds
    assert stage_plan(tmp_path, "extract", "to do", 100, Rates({}, {}, None)).seconds is None


def test_a_stage_without_work_of_its_own_takes_what_it_took_or_a_minute(tmp_path: Path) -> None:
    assert stage_plan(tmp_path, "export", "to do", None, Rates({}, {}, MEASURED)).seconds == 7
    assert stage_plan(tmp_path, "export", "to do", None, Rates({}, {}, None)).seconds == 60


def test_a_stage_that_is_done_takes_nothing_more(tmp_path: Path) -> None:
    write_record(tmp_path, "extract", {}, done=True, seconds=90.0)
    found = stage_plan(tmp_path, "extract", "done", 100, Rates({"extract": 1.0}, {}, None))
    assert found.seconds == 0
    assert found.basis.startswith("took ")


@pytest.mark.parametrize(("in_turns", "seconds"), [(0, 100), (1, 150), (2, 125)])
def test_captures_add_to_training_unless_a_fleet_captures_ahead(in_turns: int, seconds: float) -> None:
    train = StagePlan("train", "to do", "work", 100.0, "basis")
    assert with_captures(train, 500, (10.0, "10/s"), in_turns).seconds == seconds
    assert with_captures(train, 500, None, in_turns).seconds is None


@pytest.mark.parametrize("text", ["extract=0", "extract=-1", "extract=", "extract=x", "extrct=1"])
def test_a_rate_that_is_no_number_of_a_stage_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--rate"):
        given_rates([text])
