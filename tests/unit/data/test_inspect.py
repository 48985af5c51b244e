"""Looking at prepared data: what is shown is what is trained."""

import re
from typing import Any

import pytest

from data_support import FakeContext, Prepare, make_tokenizer
from eyas.config.load import load_config
from eyas.data.coverage import summarize
from eyas.errors import UserError
from eyas.report.data_section import data_section
from eyas.report.pages import render
from eyas.stages.inspect import inspect_prepared

TOKENIZER = make_tokenizer()
ROWS: list[Any] = [
    {"id": f"r{i}", "prompt": f"question [bold]{i}[/bold]", "response": f"answer {i} 中"} for i in range(9)
]


def _context(out: Any) -> FakeContext:
    context = FakeContext(load_config(out.folder.parent / "run.yaml"))
    context.tokenizer = TOKENIZER
    return context


def test_trained_text_is_marked_and_everything_else_is_not(
    run_prepare: Prepare, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_prepare(TOKENIZER, [*ROWS, {"id": "x", "messages": []}])
    capsys.readouterr()
    inspect_prepared(_context(out), 4, None)
    shown = capsys.readouterr().out
    assert len(re.findall(r"⟦answer \d 中<\|im_end\|>⟧", shown)) == shown.count("⟦") >= 3
    assert re.search(r"question \[bold\]\d\[/bold\]<\|im_end\|>", shown)
    for line in ("rows read", "dropped empty_conversation", "draft vocabulary covers", "shape prompt and"):
        assert line in shown


def test_one_sample_can_be_asked_for(run_prepare: Prepare, capsys: pytest.CaptureFixture[str]) -> None:
    context = _context(run_prepare(TOKENIZER, ROWS))
    capsys.readouterr()
    inspect_prepared(context, 3, "r4")
    assert re.findall(r"⟦.*?⟧", capsys.readouterr().out) == ["⟦answer 4 中<|im_end|>⟧"]
    with pytest.raises(UserError, match="no sample 'r44'"):
        inspect_prepared(context, 3, "r44")


def test_prompts_that_wait_for_answers_are_summarized(
    run_prepare: Prepare, capsys: pytest.CaptureFixture[str]
) -> None:
    context = _context(run_prepare(TOKENIZER, ROWS, "regenerate.enabled=true"))
    inspect_prepared(context, 3, None)
    assert "samples come with: eyas regenerate" in capsys.readouterr().out
    assert "no data" in render("data.html.j2", data=data_section(context.data_folder))


def test_the_bars_count_every_sample_once(run_prepare: Prepare) -> None:
    summary = summarize(run_prepare(TOKENIZER, ROWS).folder)
    assert sum(n for _, n in summary.length_bars()) == len(ROWS)
    assert sum(n for _, n in summary.share_bars()) == len(ROWS)


def test_the_report_draws_lengths_shares_coverage_and_drops(run_prepare: Prepare) -> None:
    out = run_prepare(TOKENIZER, [*ROWS, {"id": "x", "messages": [{"role": "a<b", "content": ""}]}])
    page = render("data.html.j2", data=data_section(_context(out).data_folder))
    assert page.count('<div class="bars">') == 4
    assert "unknown_role:a&lt;b" in page
