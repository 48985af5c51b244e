"""Regeneration through a server: its own history, nothing twice, nothing lost, every trouble named."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from data_support import FakeContext, Outcome, make_tokenizer, outcome_of, spans
from eyas.config.load import load_config
from eyas.data.answer_journal import AnswerJournal
from eyas.data.prepared import read_conversations
from eyas.engines import endpoint
from eyas.errors import ContractError, EyasError, UserError
from eyas.files import seal
from eyas.stages.prepare import prepare
from eyas.stages.regenerate import regenerate
from eyas.types import Completion
from fake_server import FakeServer

TOKENIZER = make_tokenizer()
EOS = TOKENIZER.eos_token_id
ROWS = [{"id": f"r{i}", "prompt": f"question {i}"} for i in range(20)]
Regenerate = Callable[..., Outcome]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(TOKENIZER) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_LONGEST_PAUSE_S", 0.001)


@pytest.fixture
def run(tmp_path: Path, server: FakeServer) -> Regenerate:
    """Prepare rows once, and regenerate them against the server with further settings."""

    def regenerated(rows: list[Any], *settings: str) -> Outcome:
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        base = (
            f"run_dir={tmp_path / 'run'}",
            "target.model=none",
            f"data.sources={source}",
            "data.max_drop_share=1",
            f"regenerate.endpoint={server.url}",
        )
        context = FakeContext(load_config(None, (*base, *settings)))
        context.tokenizer = TOKENIZER
        prepare(context)
        regenerate(context)
        return outcome_of(context.folder("regenerate"))

    return regenerated


def test_every_prompt_is_answered_once_with_the_servers_own_tokens(
    run: Regenerate, server: FakeServer
) -> None:
    out = run(ROWS)
    assert len(out.samples) == len(server.answers) == len(ROWS)
    assert set(server.answers.values()) == {1}
    for sample in out.samples:
        num_prompt = int((~sample.loss_mask).sum())
        prompt = tuple(sample.input_ids[:num_prompt].tolist())
        assert sample.input_ids[num_prompt:].tolist() == server.answer_ids(prompt)
    assert out.manifest["finish_reasons"] == {"stop": len(ROWS)}
    assert out.manifest["served_by"] == "target"
    assert out.manifest["num_retokenized"] == 0


def test_later_turns_are_answered_on_the_targets_own_history(run: Regenerate, server: FakeServer) -> None:
    roles = ("user", "assistant")
    row = {"id": "a", "messages": [{"role": roles[i % 2], "content": f"old {i}"} for i in range(5)]}
    tool = {"role": "tool", "content": "tool said 4"}
    out = run([row, {"id": "b", "messages": [*row["messages"][:2], tool]}])
    conversations = {c.conversation_id: c for _, c in read_conversations(out.folder)}
    a, b = conversations["a"], conversations["b"]
    assert [m.content for m in a.messages[::2]] == ["old 0", "old 2", "old 4"]
    assert all(m.content.startswith("The answer is") for m in a.messages[1::2])
    assert len(a.messages) == 6
    assert b.messages[2].content == "tool said 4"
    assert len(spans(next(s for s in out.samples if s.sample_id == "a"), TOKENIZER)) == 3
    third = next(p for p in server.answers if "old 4" in TOKENIZER.decode(p))
    assert "old 1" not in TOKENIZER.decode(third)
    assert a.messages[1].content in TOKENIZER.decode(third)


def test_an_answer_that_met_the_limit_has_no_end_of_turn_and_is_marked(
    run: Regenerate, server: FakeServer
) -> None:
    server.finish_reason = "length"
    out = run(ROWS[:3], "regenerate.max_new_tokens=7")
    assert all(s.cut and s.input_ids[-1] != EOS for s in out.samples)
    assert out.manifest["finish_reasons"] == {"length": 3}
    assert {body["max_tokens"] for body in server.bodies} == {7}


def test_text_alone_is_tokenized_again_and_counted(run: Regenerate, server: FakeServer) -> None:
    server.returns_ids = False
    out = run(ROWS)
    assert out.manifest["num_retokenized"] == len(ROWS)
    assert all(s.input_ids[-1] == EOS and s.loss_mask[-1] for s in out.samples)


def test_fields_that_a_server_does_not_know_are_left_out(run: Regenerate, server: FakeServer) -> None:
    server.refused_fields = {"return_token_ids"}
    server.returns_ids = False
    assert len(run(ROWS).samples) == len(ROWS)


def test_requests_carry_neutral_sampling_values_unless_they_are_chosen(
    run: Regenerate, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="eyas")
    server.refused_fields = {"min_p"}
    run(ROWS, "regenerate.extra_body={top_k: 5}")
    for body in server.bodies:
        assert {key: body.get(key) for key in endpoint.NEUTRAL} == {
            "top_p": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "top_k": 5,
            "min_p": None,
            "repetition_penalty": 1.0,
        }
    assert "the server does not take min_p" in caplog.text


def test_a_server_that_does_not_take_its_likeliest_tokens_is_refused(
    run: Regenerate, server: FakeServer
) -> None:
    server.lag = 0.2
    with pytest.raises(ContractError, match=r"16 of 16 differ, that to r\d+:0 by 0\.20") as caught:
        run(ROWS)
    assert "penalty" in str(caught.value.hint)
    assert not server.bodies


def test_what_a_server_leaves_open_is_said(
    run: Regenerate, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="eyas")
    server.lag = None
    run(ROWS)
    assert "the server offers no rendering to compare with" in caplog.text
    assert "cannot tell whether it adds a penalty" in caplog.text
    assert "cannot tell whether the server's model is the target: none is not on this machine" in caplog.text


def test_the_model_behind_adapters_is_taken(run: Regenerate, server: FakeServer) -> None:
    server.models, server.parents = ["base", "tuned"], {"tuned": "base"}
    run(ROWS)
    assert {b["model"] for b in server.bodies} == {"base"}


def test_a_model_that_is_an_adapter_is_refused(run: Regenerate, server: FakeServer) -> None:
    server.models, server.parents = ["base", "tuned"], {"tuned": "base"}
    with pytest.raises(UserError, match=r"the server's tuned is an adapter \(LoRA\) of base"):
        run(ROWS, "regenerate.extra_body={model: tuned}")
    assert not server.bodies


def test_a_busy_or_breaking_server_is_asked_again(run: Regenerate, server: FakeServer) -> None:
    server.troubles = [503, 0, 429, 500, 0]
    out = run(ROWS)
    assert len(out.samples) == len(ROWS)
    assert set(server.answers.values()) == {1}


def test_a_failure_stops_the_stage_and_the_next_run_asks_only_for_what_is_missing(
    run: Regenerate, server: FakeServer, tmp_path: Path
) -> None:
    out_of = {tuple(p) for p in _prompts(ROWS[7:8])}
    server.failing_prompts = out_of
    with pytest.raises(EyasError, match=r"r7:0: HTTP 400.*not liked") as caught:
        run(ROWS, "regenerate.concurrency=1")
    assert "same command" in str(caught.value.hint)
    journal = tmp_path / "run" / "regenerated" / "answers.jsonl"
    kept = journal.read_text().splitlines()
    assert 0 < len(kept) < len(ROWS)
    server.failing_prompts = set()
    out = run(ROWS)
    assert len(out.samples) == len(ROWS)
    assert journal.read_text().splitlines()[: len(kept)] == kept
    # Only the request that was under way when the stage stopped can have been sent twice.
    assert sum(server.answers.values()) <= len(ROWS) + 1


def test_failures_within_the_limit_are_listed_and_the_rest_goes_on(
    run: Regenerate, server: FakeServer
) -> None:
    server.failing_prompts = {tuple(p) for p in _prompts(ROWS[7:8])}
    out = run(ROWS, "regenerate.max_failures=1")
    assert len(out.samples) == len(ROWS) - 1
    (drop,) = out.drops
    assert (drop.row_id, drop.reason.split(":")[0]) == ("r7", "generation_failed")
    counts = out.manifest["counts"]
    kept = counts["train_conversations"] + counts["held_out_conversations"]
    assert kept + len(out.drops) == out.manifest["num_read"]


def test_hundreds_are_in_flight_at_once(run: Regenerate, server: FakeServer) -> None:
    server.hold_until_in_flight = 300
    rows = [{"prompt": f"question {i}"} for i in range(500)]
    assert len(run(rows, "regenerate.concurrency=300").samples) == 500
    assert server.most_in_flight == 300


def test_more_requests_than_open_files_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    for limits, allowed in (((1024, 4096), 3000), ((1024, 2256), 2000), ((8192, 8192), 3000)):
        monkeypatch.setattr(endpoint.resource, "getrlimit", lambda _, limits=limits: limits)
        monkeypatch.setattr(endpoint.resource, "setrlimit", lambda _, limits: raised.append(limits))
        assert endpoint._allow_connections(3000) == allowed
    assert raised == [(3256, 4096), (2256, 2256)]


def test_where_the_answers_come_from_is_not_part_of_what_they_are(
    run: Regenerate, server: FakeServer
) -> None:
    run(ROWS)
    run(ROWS, "regenerate.endpoint=http://127.0.0.1:9/v1", "regenerate.concurrency=2")
    assert set(server.answers.values()) == {1}


def test_sampling_is_sent_and_recorded(run: Regenerate, server: FakeServer) -> None:
    out = run(ROWS, "regenerate.temperature=0.7", "regenerate.extra_body={top_p: 0.9}", "seed=5")
    assert {(b["temperature"], b["top_p"], b["model"]) for b in server.bodies} == {(0.7, 0.9, "target")}
    assert len({b["seed"] for b in server.bodies}) == len(ROWS)
    assert out.manifest["sampling"] == {"max_new_tokens": 512, "temperature": 0.7, "seed": 5, "top_p": 0.9}


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions/render", "/v1/chat/completions"])
def test_a_server_that_renders_otherwise_is_refused(path: str, run: Regenerate, server: FakeServer) -> None:
    server.rendered = [1, 2, 3]
    server.renders_at = path
    with pytest.raises(ContractError, match="the server renders a prompt to 3 tokens"):
        run(ROWS)
    assert not server.answers


def test_a_server_that_renders_a_second_turn_otherwise_is_refused(
    run: Regenerate, server: FakeServer
) -> None:
    server.rendered = _prompts(ROWS[:1])[0]  # right for the first turn, and all that it ever renders
    turns = ["question 0", "said before", "and more"]
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
    with pytest.raises(ContractError, match="the first difference is at token"):
        run([{"id": "r0", "messages": messages}])
    assert not server.answers


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions/render", "/v1/chat/completions"])
def test_a_server_that_renders_alike_is_used(path: str, run: Regenerate, server: FakeServer) -> None:
    server.renders_at = path
    server.rendered = _prompts(ROWS[:1])[0]
    assert len(run(ROWS[:1]).samples) == 1


def test_a_server_that_is_not_there_or_has_several_models_is_explained(
    run: Regenerate, server: FakeServer
) -> None:
    with pytest.raises(UserError, match="does not answer /models"):
        run(ROWS, "regenerate.endpoint=http://127.0.0.1:9/v1")
    server.models = ["a", "b"]
    with pytest.raises(UserError, match="2 models: a, b"):
        run(ROWS)
    with pytest.raises(UserError, match="is stale: regenerate"):
        run(ROWS, "regenerate.extra_body={model: b}")
    assert {b["model"] for b in server.bodies} == set()


def test_a_field_that_eyas_sets_itself_is_refused(run: Regenerate) -> None:
    with pytest.raises(UserError, match="'stop'"):
        run(ROWS, "regenerate.extra_body={stop: x}")


def test_an_answer_to_another_prompt_is_not_used_and_is_counted(
    run: Regenerate, server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An interrupted run that continues after midnight, with a template that shows the date."""
    caplog.set_level(logging.INFO, logger="eyas")
    dated = "{{ '<|im_start|>system\\n' + strftime_now('%d') + '<|im_end|>\\n' }}" + TOKENIZER.chat_template
    monkeypatch.setattr(TOKENIZER, "chat_template", dated)
    day = ["01"]
    monkeypatch.setattr(chat_template_utils, "datetime", _Clock(day))
    chat_template_utils._compile_jinja_template.cache_clear()
    rows = [{"id": "two", "turns": ["q", "again"]}, *ROWS[:5]]
    server.failing_prompts = {tuple(p) for p in _prompts(ROWS[3:4])}
    with pytest.raises(EyasError, match="r3:0"):
        run(rows, "regenerate.concurrency=1")
    day[0], server.failing_prompts = "02", set()
    out = run(rows)
    assert len(out.samples) == len(rows)
    for sample in out.samples:
        assert "system\n02<" in TOKENIZER.decode(sample.input_ids)
        start = int((~sample.loss_mask).nonzero()[0][-1]) + 1
        assert sample.input_ids[start:].tolist() == server.answer_ids(
            tuple(sample.input_ids[:start].tolist())
        )
    num_redone = out.manifest["num_answers_to_other_prompts"]
    assert 0 < num_redone < len(rows) + 1
    assert f"{num_redone} earlier answers were given to other prompts" in caplog.text


class _Clock:
    """A datetime whose now() formats to a day that the test sets."""

    def __init__(self, day: list[str]) -> None:
        self.day = day

    def now(self) -> "_Clock":
        return self

    def strftime(self, form: str) -> str:
        return form.replace("%d", self.day[0])


def test_journal_lines_of_an_older_version_are_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    old = {"prompt_id": "a:0", "token_ids": [5, 6], "finish_reason": "stop"}
    path.write_text(json.dumps(seal(old)) + "\n")
    journal = AnswerJournal(path)
    assert not journal.holds("a:0", (1, 2))
    assert journal.num_other_prompts == 1
    journal.add(Completion("a:0", (7,), "stop"), (1, 2))
    journal.close()
    again = AnswerJournal(path)
    assert again.holds("a:0", (1, 2))
    assert again.read("a:0") == Completion("a:0", (7,), "stop")
    assert not again.holds("a:0", (1, 3))
    again.close()


def test_a_turn_that_is_context_only_is_neither_asked_nor_trained(
    run: Regenerate, server: FakeServer
) -> None:
    roles = ("user", "assistant")
    messages: list[Any] = [{"role": roles[i % 2], "content": f"old {i}"} for i in range(5)]
    messages[1]["weight"] = 0
    out = run([{"id": "a", "messages": messages}])
    ((_, conversation),) = read_conversations(out.folder)
    assert conversation.messages[1].content == "old 1"
    assert not conversation.messages[1].trained
    assert conversation.messages[3].content.startswith("The answer is")
    assert len(server.answers) == 2
    assert all("old 1" in TOKENIZER.decode(prompt) for prompt in server.answers)
    assert "old 1" not in "".join(out.trained(TOKENIZER)["a"])


def test_a_torn_journal_keeps_all_but_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    first = AnswerJournal(path)
    for i in range(3):
        first.add(Completion(f"é{i}", (i, 7), "stop"), (1, i))
    first.close()
    path.write_bytes(path.read_bytes()[:-4])
    again = AnswerJournal(path)
    assert len(again) == 2
    assert not again.holds("é2", (1, 2))
    again.add(Completion("é2", (9,), "length"), (1, 2))
    assert again.read("é2") == Completion("é2", (9,), "length")
    assert again.read("é0") == Completion("é0", (0, 7), "stop")
    with pytest.raises(EyasError, match="answered twice"):
        again.add(Completion("é0", (1,), "stop"), (1, 0))
    again.close()
    third = AnswerJournal(path)
    assert len(third) == 3
    third.close()


def _prompts(rows: list[Any]) -> list[list[int]]:
    return [
        TOKENIZER.apply_chat_template([{"role": "user", "content": r["prompt"]}], add_generation_prompt=True)[
            "input_ids"
        ]
        for r in rows
    ]
