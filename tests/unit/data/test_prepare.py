"""The stage: nothing vanishes, nothing leaks, the same data gives the same folder."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_support import FakeContext, Prepare, make_tokenizer
from eyas.config.load import load_config
from eyas.data.dedup_and_split import below_share
from eyas.data.prepared import read_conversations, read_samples
from eyas.data.vocab import always_kept, build_vocab_map, count_supervised, coverage_at
from eyas.errors import UserError
from eyas.stages.prepare import prepare

TOKENIZER = make_tokenizer()


def _qa(question: str, answer: str = "yes", **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
        **more,
    }


MANY = [_qa(f"question {i}", f"answer {i}", id=f"r{i}") for i in range(400)]


def _held_out(folder: Path) -> set[str]:
    return {s.sample_id for s in read_samples(folder, "held_out")}


def test_the_split_does_not_depend_on_order_or_neighbours(run_prepare: Prepare) -> None:
    whole = _held_out(run_prepare(TOKENIZER, MANY, "data.validation_fraction=0.1").folder)
    assert 20 < len(whole) < 60
    mixed = random.Random(0).sample(MANY, len(MANY))
    assert _held_out(run_prepare(TOKENIZER, mixed, "data.validation_fraction=0.1").folder) == whole
    part = _held_out(run_prepare(TOKENIZER, MANY[100:], "data.validation_fraction=0.1").folder)
    assert part == {i for i in whole if int(i[1:]) >= 100}
    more = _held_out(run_prepare(TOKENIZER, MANY, "data.validation_fraction=0.2").folder)
    assert whole < more
    assert _held_out(run_prepare(TOKENIZER, MANY, "data.validation_fraction=0.1", "seed=1").folder) != whole


def test_one_question_under_many_ids_is_on_one_side(run_prepare: Prepare) -> None:
    rows = [_qa(f"question {i % 40}", f"answer {i}", id=f"{i}") for i in range(400)]
    out = run_prepare(TOKENIZER, rows, "data.validation_fraction=0.2")
    held = {int(i) % 40 for i in _held_out(out.folder)}
    assert held
    assert not held & {int(s.sample_id) % 40 for s in read_samples(out.folder, "train")}


@pytest.mark.parametrize("number", [2, 3, 7])
@pytest.mark.parametrize("share", [0.001, 0.999])
def test_a_small_data_set_has_both_sides(number: int, share: float, run_prepare: Prepare) -> None:
    counts = run_prepare(TOKENIZER, MANY[:number], f"data.validation_fraction={share}").manifest["counts"]
    assert counts["train_samples"] >= 1
    assert counts["held_out_samples"] >= 1


def test_nothing_is_held_out_when_the_validation_fraction_is_zero(run_prepare: Prepare) -> None:
    for number in (2, 7, 300):
        counts = run_prepare(TOKENIZER, MANY[:number], "data.validation_fraction=0").manifest["counts"]
        assert counts["train_conversations"] == number
        assert not counts.get("held_out_conversations")


def test_one_conversation_is_trained_on(run_prepare: Prepare) -> None:
    for share in (0, 0.001, 0.999):
        counts = run_prepare(TOKENIZER, MANY[:1], f"data.validation_fraction={share}").manifest["counts"]
        assert (counts["train_samples"], counts.get("held_out_samples", 0)) == (1, 0)


def test_the_same_text_twice_is_one_row_and_the_repeat_is_listed(run_prepare: Prepare) -> None:
    out = run_prepare(TOKENIZER, [_qa("a"), _qa("b", id=3), _qa("a", score=1), _qa("b", id="3")])
    assert len(out.samples) == 2
    assert [d.reason for d in out.drops] == ["duplicate", "duplicate"]


def test_too_many_drops_stop_the_stage_and_name_the_reasons(run_prepare: Prepare, tmp_path: Path) -> None:
    rows = [*MANY[:17], {"messages": []}, {"id": "x", "prompt": "q"}, {}]
    assert run_prepare(TOKENIZER, rows, "data.max_drop_share=0.15").manifest["num_read"] == 20
    with pytest.raises(UserError, match=r"3 of 20 rows were dropped.*no_assistant_turn: 1"):
        run_prepare(TOKENIZER, rows, "data.max_drop_share=0.14")
    lines = (tmp_path / "run" / "prepared-drops.jsonl").read_text().splitlines()
    listed = [json.loads(line) for line in lines]
    assert {d["row_id"] for d in listed} >= {"x", str(tmp_path / "rows.jsonl:18")}


def test_a_weight_uses_that_share_of_a_source_and_the_same_rows_each_time(
    run_prepare: Prepare, tmp_path: Path
) -> None:
    for name, part in (("a", MANY[:200]), ("b", MANY[200:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))
    sources = [{"path": str(tmp_path / "a.jsonl"), "weight": 0.25}, str(tmp_path / "b.jsonl")]
    outs = [
        run_prepare(TOKENIZER, MANY[:1], f"data.sources={json.dumps(s)}") for s in (sources, sources[::-1])
    ]
    names = [{s.sample_id for s in out.samples} for out in outs]
    assert names[0] == names[1]
    from_a = {n for n in names[0] if int(n[1:]) < 200}
    assert 30 < len(from_a) < 70
    assert len(names[0] - from_a) == 200
    manifest = outs[0].manifest
    assert manifest["num_read"] + manifest["num_left_out_by_weight"] == 400


def test_two_questions_in_a_row_are_counted_and_an_answer_behind_a_tool_is_not(run_prepare: Prepare) -> None:
    asks_twice = [{"role": "user", "content": "a"}, *_qa("b")["messages"]]
    uses_tool = [
        *_qa("a")["messages"],
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "so"},
    ]
    out = run_prepare(TOKENIZER, [{"messages": asks_twice}, {"messages": uses_tool}])
    assert out.manifest["warnings"] == {"repeated_role": 1}


def test_prompts_are_checked_when_the_target_will_answer_them(run_prepare: Prepare) -> None:
    rows = [
        {"id": "prompt", "prompt": "q"},
        {"id": "two", "turns": ["q", "again"]},
        _qa("q", "", id="blank"),
        {"id": "long", "prompt": "word " * 500},
        {"id": "text", "text": "<|im_start|>assistant\nx<|im_end|>"},
        {"id": "opens", "messages": [{"role": "assistant", "content": "Sure."}]},
        {"id": "tools", "prompt": "q", "tools": [{"name": "f"}]},
    ]
    out = run_prepare(TOKENIZER, rows, "regenerate.enabled=true", "data.max_length=100")
    assert {c.conversation_id for _, c in read_conversations(out.folder)} == {"prompt", "two", "blank"}
    assert out.reasons() == {
        "long": "prompt_too_long",
        "text": "not_a_conversation",
        "opens": "starts_with_assistant",
        "tools": "template_lacks_tools",
    }


def test_the_run_file_that_a_stage_writes_says_the_same_again(run_prepare: Prepare, tmp_path: Path) -> None:
    out = run_prepare(
        TOKENIZER, MANY[:3], "data.template_kwargs={enable_thinking: false}", "data.role_map.robot=assistant"
    )
    assert out.manifest["template_kwargs"] == {"enable_thinking": False}
    again = load_config(tmp_path / "run" / "run.yaml").config
    assert again.data.template_kwargs == {"enable_thinking": False}
    assert again.data.role_map == {"robot": "assistant"}
    context = FakeContext(load_config(tmp_path / "run" / "run.yaml"))
    context.tokenizer = TOKENIZER
    prepare(context)  # done already, and so neither refused nor redone


def test_other_template_settings_are_other_data(run_prepare: Prepare, tmp_path: Path) -> None:
    run_prepare(TOKENIZER, MANY[:3])
    context = FakeContext(load_config(tmp_path / "run" / "run.yaml", ("data.template_kwargs.a=1",)))
    context.tokenizer = TOKENIZER
    with pytest.raises(UserError, match="template_kwargs"):
        prepare(context)


def test_half_a_surrogate_pair_in_the_data_stops_nothing(run_prepare: Prepare) -> None:
    broken = {"prompt": "q \ud83e", "response": "yes"}
    out = run_prepare(
        TOKENIZER, [*MANY[:2], broken, {**broken, "id": "x\ud83e"}, {**MANY[2], "id": "\ud83e"}]
    )
    assert [d.reason for d in out.drops] == ["invalid_unicode"] * 3


ANY_TEXT = st.text(max_size=6)
ANY_MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool", "robot", "gpt"]),
        "content": st.none()
        | ANY_TEXT
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": ANY_TEXT})),
    }
)
ANY_ROW = st.one_of(
    st.fixed_dictionaries({"messages": st.lists(ANY_MESSAGE, max_size=5)}),
    st.fixed_dictionaries({"prompt": ANY_TEXT, "response": st.none() | ANY_TEXT}),
    st.fixed_dictionaries({"text": ANY_TEXT.map(lambda t: f"<|im_start|>assistant\n{t}<|im_end|>")}),
    st.fixed_dictionaries(
        {"input_ids": st.lists(st.integers(-1, 700)), "loss_mask": st.lists(st.integers(0, 1))}
    ),
    st.none() | st.integers() | ANY_TEXT,
)


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(ANY_ROW, max_size=8), st.integers(2, 40))
def test_what_is_read_is_kept_or_listed_as_dropped(
    run_prepare: Prepare, rows: list[Any], length: int
) -> None:
    out = run_prepare(TOKENIZER, [_qa("a", "b", id="good"), *rows], f"data.max_length={max(length, 14)}")
    counts = out.manifest["counts"]
    kept = counts["train_conversations"] + counts.get("held_out_conversations", 0)
    assert kept + len(out.drops) == out.manifest["num_read"] == 1 + len(rows)
    assert sum(out.manifest["drops"].values()) == len(out.drops)
    assert len({s.sample_id for s in out.samples}) == len(out.samples)
    assert all(s.supervised.any() and len(s) <= max(length, 14) for s in out.samples)


def test_rare_special_tokens_that_the_target_says_are_in_the_vocabulary(run_prepare: Prepare) -> None:
    counts = np.array([0, 1, 90, 80, 70, 1, 0])
    always = always_kept(counts, [6], [0, 5, 99])
    assert always == [5, 6]
    assert build_vocab_map(counts, 3, always).target_ids.tolist() == [2, 5, 6]
    with pytest.raises(UserError, match=r"draft\.vocab_size=1 is smaller"):
        build_vocab_map(counts, 1, always)


def test_coverage_in_the_manifest_is_of_the_training_side(run_prepare: Prepare) -> None:
    out = run_prepare(TOKENIZER, MANY)
    counts = count_supervised(read_samples(out.folder, "train"), len(TOKENIZER))
    assert out.manifest["coverage"] == coverage_at(counts, [8192, 16384, 32768, 65536])
    assert coverage_at(np.array([6, 1, 3]), [1, 2, 3, 4]) == {"1": 0.6, "2": 0.9, "3": 1.0, "4": 1.0}


def test_a_share_is_taken_by_hash() -> None:
    taken = [below_share(str(i), 0.3, "x") for i in range(2000)]
    assert 500 < sum(taken) < 700
    assert all(below_share(str(i), 1.0, "x") for i in range(100))
