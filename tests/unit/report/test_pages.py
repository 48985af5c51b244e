"""Pages from templates: what was written by others is escaped, and nothing is loaded from elsewhere."""

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from jinja2 import UndefinedError

from eyas import registry
from eyas.config.load import load_config
from eyas.report import page
from eyas.report.card import write_card
from eyas.report.finished_run import FinishedRun
from eyas.report.page import print_summary, write_report
from eyas.report.pages import render
from tiny import make_spec

EVIL = "<script>alert('x')</script>\"&"
ESCAPED = "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&#34;&amp;"


def point(num_draft_tokens: int, concurrency: int) -> dict[str, Any]:
    return {
        "num_draft_tokens": num_draft_tokens, "temperature": 0.0, "concurrency": concurrency,
        "tokens_per_s": 10.0 * concurrency, "latency_s": 0.5, "speed_up": 1.5 if num_draft_tokens else None,
    }  # fmt: skip


SERVED: dict[str, Any] = {
    "engine": EVIL,
    "recommendation": f"serve with K = 3 {EVIL}",
    "points": [point(k, c) for k in (0, 3) for c in (1, 8)],
    "categories": [
        {"suite": "mt-bench", "category": EVIL, "num_draft_tokens": 3, "acceptance_length": [1.5, 1.5],
         "acceptance_rates": [0.5, 0.25]},
    ],
    "lossless": {"compared": 4, "differences": [], "rounding": {"share_of_large_gaps": None}},
    "sampled": [],
    "agreement": {"broken": [], "served": [1.5, 1.6], "reference": 1.55, "compared": 4},
}  # fmt: skip


def finished_run(served: dict[str, Any] | None = None) -> FinishedRun:
    report = {
        "acceptance": 1.51, "predicted": 1.52, "num_draft_tokens": 2, "num_prompts": 3, "identical": 2,
        "differences": ["one"], "acceptance_rates": [0.4, 0.2], "predicted_rates": [0.3, 0.1],
        "max_new_tokens": 12, "drafted_tokens_per_s": 5.0, "plain_tokens_per_s": 4.0, "device": "cpu",
        "dtype": "float32", "served": served,
        "examples": [
            {"prompt": EVIL, "pieces": [["target", EVIL], ["accepted", "a\n b"], ["rejected", EVIL]]},
        ],
    }  # fmt: skip
    history = [
        {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "taken": False},
        {"step": 2, "loss": 2.5, "acceptance_length": 1.2, "validation": True},
    ]  # fmt: skip
    counts = {"train_supervised_tokens": 1000, "train_conversations": 10}
    layer = {"min": -1.0, "max": 1.0, "mean": 0.0, "rms": 0.5}
    records: dict[str, dict[str, Any]] = {
        "prepare": {"drops": {"empty": 1}, "counts": counts},
        "extract": {"num_failures": 0, "layers": {"train": {"2": layer}, "held_out": {"2": layer}}},
        "train": {"num_steps": 7, "history": history, "coverage": 0.9},
        "export": {},
        "evaluate": {"done": True, "report": report},
    }
    model = f"target.model={json.dumps(EVIL)}"
    loaded = load_config(None, ("run_dir=run", model, "data.sources=[a]", "regenerate.enabled=false"))
    return FinishedRun(loaded, registry.drafter("eagle3"), make_spec(), records, Path("data"))


@pytest.fixture
def without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a page have nothing to show of the data."""
    empty: dict[str, list[Any]] = {name: [] for name in ("rows", "lengths", "shares", "coverage", "drops")}
    monkeypatch.setattr(page, "data_section", lambda folder: empty)


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    data = {
        "rows": [("dropped", EVIL)], "lengths": [("8", 2)], "shares": [], "coverage": [("64", 0.5)],
        "drops": [(EVIL, 3)],
    }  # fmt: skip
    monkeypatch.setattr(page, "data_section", lambda folder: data)
    write_report(finished_run(SERVED), tmp_path / "report.html")
    return (tmp_path / "report.html").read_text()


def test_text_of_others_is_escaped_wherever_it_appears(report: str) -> None:
    assert "<script" not in report
    # title, heading, summary, served engine and recommendation (twice), category (twice), prompt, two pieces,
    # a row and a bar of the data, the settings
    assert report.count(ESCAPED) >= 13


def test_the_report_is_whole_and_loads_nothing(report: str) -> None:
    class Balanced(HTMLParser):
        open_tags: list[str]

        def handle_starttag(self, tag: str, attributes: Any) -> None:
            assert not {name for name, _ in attributes} & {"src", "href", "onload", "onclick"}
            if tag != "meta":
                self.open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open_tags.pop() == tag

    parser = Balanced()
    parser.open_tags = []
    parser.feed(report)
    assert parser.open_tags == []
    assert report.startswith("<!doctype html>\n<html")
    assert ":root { color-scheme: light dark;" in report
    assert "url(" not in report


def test_the_report_has_the_engines_part_where_one_was_measured(report: str) -> None:
    for words in ("<h2>In the engine</h2>", "<h3>Throughput, temperature 0</h3>", "K = 3: 10.0 tokens/s"):
        assert words in report
    charts = [f"<svg{text.split('</svg>')[0]}</svg>" for text in report.split("<svg")[1:]]
    assert len(charts) == 5, "throughput, latency, speed-up, loss, acceptance length"
    for chart in charts:
        ElementTree.fromstring(chart)


@pytest.mark.usefixtures("without_data")
def test_without_an_engine_or_states_the_report_leaves_those_parts_out(tmp_path: Path) -> None:
    run = finished_run()
    run = replace(run, records={**run.records, "extract": {"num_failures": 0}})
    write_report(run, tmp_path / "report.html")
    report = (tmp_path / "report.html").read_text()
    for heading in ("In the engine", "Hidden states", "Dropped rows"):
        assert heading not in report
    assert report.count("<p>no data</p>") == 3


def test_spaces_and_line_breaks_of_an_answer_are_kept(report: str) -> None:
    assert f'<div class="example">{ESCAPED}<span class="accepted">a\n b</span>' in report


def test_the_summary_goes_to_stdout_with_the_engines_rows(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(finished_run(SERVED))
    out, err = capsys.readouterr()
    assert err == ""
    assert "recommendation" in out
    assert out.endswith("\nacceptance length: 1.51 (K=2, held-out, 3 prompts)\n")


@pytest.mark.usefixtures("without_data")
def test_screen_table_and_page_say_how_sure_the_length_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sure = finished_run()
    sure.evaluation["acceptance_interval"] = [1.42, 1.6]
    print_summary(sure)
    out = capsys.readouterr().out
    assert out.endswith("\nacceptance length: 1.51 (K=2, held-out, 3 prompts, 95 %: 1.42 to 1.60)\n")
    assert "1.510 (1.420 to 1.600) decoded" in out
    write_report(sure, tmp_path / "sure.html")
    assert "would give 1.42 to 1.60 (95 %, bootstrap over prompts)" in (tmp_path / "sure.html").read_text()
    write_report(finished_run(), tmp_path / "unsure.html")
    assert "too few prompts" in (tmp_path / "unsure.html").read_text()


def test_a_card_says_what_was_measured_or_that_nothing_was(tmp_path: Path) -> None:
    run = finished_run()
    write_card(run, tmp_path)
    assert "1.510 decoded" in (tmp_path / "README.md").read_text()
    write_card(replace(run, records={"train": run.records["train"]}), tmp_path)
    assert "Nothing has been measured with this draft" in (tmp_path / "README.md").read_text()


def test_a_value_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'figures' is undefined"):
        render("compare.html.j2", title="Runs compared", header=())


def test_bars_are_measured_against_the_longest_and_never_negative() -> None:
    histogram = [("a<b", 0.5), ("c", 0.25), ("d", -1.0)]
    text = render(
        "states.html.j2",
        title="States",
        columns=("layer",),
        splits=[{"name": "train", "rows": [("1",)], "histograms": [("1", histogram), ("2", [("a", 0.0)])]}],
    )
    assert '<b>a&lt;b</b><i style="--v:1.0000">50.00%</i>' in text
    assert '<b>c</b><i style="--v:0.5000">25.00%</i>' in text
    assert '<i style="--v:0.0000">-100.00%</i>' in text
    assert '<b>a</b><i style="--v:0.0000">0.00%</i>' in text
