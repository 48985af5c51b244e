"""report.json and its tables hold what was measured, under names that do not change."""

import csv
import json
from pathlib import Path

from eyas.config.schema import EvaluateSettings
from eyas.drafters.common.acceptance import Acceptance
from eyas.engines.base import Prompt
from eyas.evaluate.decode import Decoded
from eyas.evaluate.in_process import Here
from eyas.report.page import context_rows
from eyas.serving.agreement import HeldOut
from eyas.serving.report import evaluation_report, write_report


def acceptance(*accepted: int) -> Acceptance:
    total = Acceptance.empty(2)
    for n in accepted:
        total.add_round(n)
    return total


def held_out() -> HeldOut:
    here = Here(
        {"a": Decoded([1, 2, 3], 2.0)}, {"a": Decoded([1, 2, 3], 1.0, (), acceptance(2))}, differences=[]
    )
    return HeldOut([Prompt("a", (9,))], {"a": (1, 2, 3)}, {"a": acceptance(1)}, here)


def test_rounds_are_reported_by_the_length_of_their_context() -> None:
    drafted = {"a": Decoded([1, 2, 3], 1.0, (), acceptance(1, 0), (((1, 2), 1), ((3, 4), 0)))}
    here = Here({"a": Decoded([1, 2, 3], 2.0)}, drafted, differences=[])
    found = HeldOut([Prompt("a", (9,) * 2046)], {}, {}, here, {"a": [2, 0]})
    report = evaluation_report(EvaluateSettings(num_draft_tokens=2), "float32", "cpu", found, None)
    none, one = {"num_rounds": 1, "accepted_at": (0, 0), "length": 1.0}, (1, 0)
    first = {"num_rounds": 1, "accepted_at": one, "length": 2.0}
    assert report["by_context"]["decoded"] == {"0-2k": first, "2-4k": none}
    assert report["by_context"]["predicted"]["2-4k"] == none
    ((title, said),) = context_rows(report)
    assert title == "acceptance length, by context"
    assert said == "0-2k 2.00 (1 rounds), 2-4k 1.00 (1 rounds)"
    del report["by_context"]["decoded"]["2-4k"]
    assert context_rows(report) == context_rows({}) == []  # one range, or a report of an earlier version


def test_what_was_decoded_here_is_reported_greedy_with_both_speeds() -> None:
    report = evaluation_report(EvaluateSettings(num_draft_tokens=2), "float32", "cpu", held_out(), None)
    assert (report["temperature"], report["served"], report["differences"]) == (0.0, None, [])
    assert (report["acceptance"], report["predicted"]) == (3.0, 2.0)
    assert (report["plain_tokens_per_s"], report["drafted_tokens_per_s"]) == (1.5, 3.0)
    assert report["identical"] == report["num_prompts"] == 1


def test_tables_have_a_column_for_each_bound_and_rate(tmp_path: Path) -> None:
    points = [
        {"num_draft_tokens": 0, "acceptance_length": None, "acceptance_rates": None},
        {
            "num_draft_tokens": 2,
            "tokens_per_s_range": (90.0, 110.0),
            "acceptance_length": (1.0, 1.5),
            "acceptance_rates": [0.5, 0.25],
        },
    ]
    arrivals = [{"num_draft_tokens": 2, "requests_per_s": 4.0, "inter_token_s": None}]
    served = {"points": points, "categories": points[1:], "arrivals": arrivals}
    write_report(tmp_path, {"served": served})
    assert json.loads((tmp_path / "report.json").read_text())["served"]["points"][1]["acceptance_rates"]
    alone, drafted = csv.DictReader((tmp_path / "serving.csv").read_text().splitlines())
    assert (alone["acceptance_length_low"], alone["acceptance_rate_1"]) == ("", "")
    assert (drafted["acceptance_length_high"], drafted["acceptance_rate_2"]) == ("1.5", "0.25")
    assert (drafted["tokens_per_s_slowest"], drafted["tokens_per_s_fastest"]) == ("90.0", "110.0")
    assert "4.0" in (tmp_path / "arrivals.csv").read_text()
    assert len(list(csv.DictReader((tmp_path / "categories.csv").read_text().splitlines()))) == 1


def test_without_a_served_draft_there_are_no_tables(tmp_path: Path) -> None:
    write_report(tmp_path, {"served": None})
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]
