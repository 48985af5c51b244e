"""Nothing that a user wrote is ignored in silence: what was not used is named, with counts."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_support import Prepare, make_tokenizer
from eyas.data.coverage import summarize
from eyas.data.row_formats import Parsed
from eyas.data.sources import Drop
from eyas.data.tally import FURTHER_KEYS, Tally
from eyas.errors import UserError

TOKENIZER = make_tokenizer()
GOOD = {"id": "good", "prompt": "question", "response": "answer"}


def test_columns_and_message_keys_that_were_not_used_are_named_with_counts(
    run_prepare: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="eyas")
    messages = [
        {"role": "user", "content": "q", "time": 1},
        {"role": "assistant", "content": [{"type": "text", "text": "r", "cache_control": {}}], "time": 2},
    ]
    out = run_prepare(TOKENIZER, [{**GOOD, "score": 3}, {"messages": messages, "score": 4, "response": "x"}])
    assert out.manifest["unused_columns"] == {"score": 2, "response": 1}
    assert out.manifest["unused_message_keys"] == {"time": 2, "content.cache_control": 1}
    shown = caplog.text
    assert "columns not used: score (2), response (1)" in shown
    assert "message keys not used: time (2), content.cache_control (1)" in shown
    rows = dict(summarize(out.folder).rows())
    assert rows["column not used: score"] == "2"
    assert rows["message key not used: time"] == "2"


def test_the_summary_says_so_when_every_column_was_used(
    run_prepare: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="eyas")
    run_prepare(TOKENIZER, [GOOD])
    assert "columns not used: none" in caplog.text


def test_entries_of_a_folder_that_are_no_data_are_named(
    run_prepare: Prepare, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="eyas")
    folder = tmp_path / "data"
    (folder / ".ipynb_checkpoints").mkdir(parents=True)
    for name in ("a.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl", "README.md", ".hidden.jsonl"):
        (folder / name).write_text(json.dumps({"prompt": name, "response": "r"}) + "\n")
    out = run_prepare(TOKENIZER, folder)
    assert out.manifest["num_read"] == 1
    names = [f"{folder}/{name}" for name in (".hidden.jsonl", ".ipynb_checkpoints/", "README.md")]
    assert out.manifest["unused_files"] == names
    assert f"no data, not read: {', '.join(names)}" in caplog.text


def test_a_refused_data_set_names_its_columns_too(
    run_prepare: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="eyas")
    with pytest.raises(UserError, match="missing_messages: 1"):
        run_prepare(TOKENIZER, [{"dialogue": ["a", "b"]}])
    assert "columns not used: dialogue (1)" in caplog.text


def test_a_refusal_for_a_flag_says_how_to_leave_the_key_out(run_prepare: Prepare) -> None:
    with pytest.raises(UserError, match="weight_not_0_or_1:loss: 1") as caught:
        run_prepare(TOKENIZER, [{**GOOD, "loss": 1.7}])
    assert "data.ignore_keys" in str(caught.value.hint)
    out = run_prepare(TOKENIZER, [{**GOOD, "loss": 1.7}], "data.ignore_keys=[loss]")
    assert out.manifest["num_read"] == len(out.samples) == 1


def test_keys_that_are_data_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.data.tally._KEYS_NAMED", 3)
    tally = Tally()
    drop = Drop("a", "a", "bad_shape")
    for key in ("a", "b", "c", "d", "e", "a"):
        tally.add_unused(Parsed(drop, "unknown", unused_columns=(key,)))
    assert tally.unused_columns == {"a": 2, "b": 1, "c": 1, FURTHER_KEYS: 2}


def test_names_that_cannot_be_printed_are_escaped(run_prepare: Prepare) -> None:
    out = run_prepare(TOKENIZER, [{**GOOD, "\x1b[2J": 1, "\ud83e": 1, "x" * 200: 1}])
    assert list(out.manifest["unused_columns"]) == ["\\x1b[2J", "\\ud83e", "x" * 100 + "…"]


WORDS = st.text("abc xyz", min_size=1, max_size=8)
SYSTEM = st.dictionaries(st.sampled_from(["system", "system_prompt"]), WORDS, max_size=2)
EXTRA = st.dictionaries(
    st.sampled_from(["score", "weight", "train", "loss", "mask", "trainable", "source", "context", "input"])
    | st.sampled_from(["answer", "response", "text", "tools", "history", "label", "finish_reason", "name"])
    | st.text("kqvw_", min_size=1, max_size=4).map("k_".__add__),
    st.none() | st.booleans() | st.integers(0, 2) | WORDS | st.just([]),
    max_size=4,
)


@st.composite
def a_message(draw: st.DrawFn, role_key: str, text_key: str) -> dict[str, Any]:
    names = ["user", "assistant", "system", "human", "gpt", "robot"]
    return {role_key: draw(st.sampled_from(names)), text_key: draw(WORDS), **draw(EXTRA)}


ROWS = st.one_of(
    st.fixed_dictionaries({"messages": st.lists(a_message("role", "content"), max_size=4)}),
    st.fixed_dictionaries({"conversations": st.lists(a_message("from", "value"), max_size=4)}),
    st.fixed_dictionaries({"instruction": WORDS, "input": WORDS, "output": WORDS}),
    st.fixed_dictionaries({"instruction": WORDS, "context": WORDS, "response": WORDS}),
    st.fixed_dictionaries({"system_prompt": WORDS, "question": WORDS, "response": WORDS}),
    st.fixed_dictionaries({"prompt": WORDS, "completion": WORDS}),
    st.fixed_dictionaries({"input": WORDS, "output": WORDS}),
    st.fixed_dictionaries({"turns": st.lists(WORDS, max_size=2)}),
    st.fixed_dictionaries({"text": WORDS.map("<|im_start|>assistant\n{}<|im_end|>".format)}),
    st.fixed_dictionaries({"input_ids": st.just([5, 6, 7]), "labels": st.just([-100, 6, 7])}),
    st.fixed_dictionaries({"input_ids": st.just([5, 6, 7]), "loss_mask": st.just([0, 1, 1])}),
)
# Keys that each format reads, for a record that says so: what else a row holds must be named.
_READ = {
    "messages": {"messages"}, "conversations": {"conversations"}, "turns": {"turns"}, "text": {"text"},
    "instruction": {"instruction", "input", "output", "context", "response", "answer", "history"},
    "question": {"question", "response", "input", "context", "history"},
    "prompt": {"prompt", "completion", "response", "input", "context", "history"},
    "input": {"input", "output", "context", "history", "response", "answer"},
    "input_ids": {"input_ids", "labels", "loss_mask"},
}  # fmt: skip
_FORMS = (
    "input_ids", "messages", "conversations", "instruction", "question", "prompt", "turns", "text", "input",
)  # fmt: skip
_CONVERSATIONAL = {"id", "tools", "system", "system_prompt", "finish_reason"}
_FLAGS = {"weight", "train", "loss", "mask", "trainable"}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(
        st.builds(lambda row, extra, system: {**extra, **system, **row}, ROWS, EXTRA, SYSTEM), max_size=6
    )
)
def test_every_row_is_kept_or_dropped_and_every_key_is_used_or_named(
    run_prepare: Prepare, rows: list[dict[str, Any]]
) -> None:
    out = run_prepare(TOKENIZER, [{**GOOD, "zz": 0}, *rows])
    counts, manifest = out.manifest["counts"], out.manifest
    kept = counts["train_conversations"] + counts.get("held_out_conversations", 0)
    assert kept + len(out.drops) == manifest["num_read"] == 1 + len(rows)
    named = manifest["unused_columns"].keys()
    for row in rows:
        form = next(key for key in _FORMS if row.get(key) is not None)
        used = _READ[form] | _FLAGS | (_CONVERSATIONAL if form not in ("text", "input_ids") else {"id"})
        assert row.keys() - used <= named
        for message in row.get("messages", row.get("conversations", ())):
            read = {"role", "from", "content", "value", "name", "finish_reason", *_FLAGS}
            assert message.keys() - read <= manifest["unused_message_keys"].keys()


def test_a_key_is_counted_once_for_each_row_or_named_key(run_prepare: Prepare) -> None:
    rows = [{**GOOD, "id": str(i), "prompt": f"q{i}", **({"odd": 1} if i % 3 else {})} for i in range(30)]
    assert run_prepare(TOKENIZER, rows).manifest["unused_columns"] == {"odd": 20}
