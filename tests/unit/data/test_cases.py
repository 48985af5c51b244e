"""The public cases: inputs from bug reports with the right result beside each."""

import json
from pathlib import Path
from typing import Any

import pytest

from data_support import Prepare
from eyas.data.chat import ChatRenderer
from eyas.data.row_formats import parse_row
from eyas.data.sources import Row
from eyas.data.vocab import build_vocab_map, count_supervised
from eyas.errors import UserError

# Cases whose outcome is not one status for each row have tests of their own below.
_OWN_TESTS = {"15_truncated_at_assistant", "12_reasoning_in_earlier_turns", "03b_all_rows_dropped"}


def _cases(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.expect.json"))


def _names() -> list[str]:
    for parent in Path(__file__).parents[4:6]:
        found = [p.name.removesuffix(".expect.json") for p in _cases(parent / "shared" / "cases")]
        if found:
            return [name for name in found if not name.startswith("30_")]
    return []


def _load(shared: Path, name: str) -> dict[str, Any]:
    return json.loads((shared / "cases" / f"{name}.expect.json").read_text(encoding="utf-8"))


def _tokenizer(shared: Path, smollm2: Any, expected: dict[str, Any]) -> Any:
    import copy

    tokenizer = copy.deepcopy(smollm2)
    if expected.get("template", "smollm2") != "smollm2":
        path = shared / "cases" / "templates" / f"{expected['template']}.jinja"
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        if "bos_token" in tokenizer.chat_template:
            tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return tokenizer


@pytest.mark.parametrize("name", [n for n in _names() if n not in _OWN_TESTS])
def test_every_row_of_a_public_case_ends_as_it_should(
    name: str, shared: Path, smollm2: Any, run_prepare: Prepare, tmp_path: Path
) -> None:
    expected = _load(shared, name)
    tokenizer = _tokenizer(shared, smollm2, expected)
    source = shared / "cases" / f"{name}.jsonl"
    if name.startswith("22_"):  # holds a conflict, which is an error of the whole; without it:
        lines = source.read_text().splitlines()
        source = tmp_path / "rest.jsonl"
        source.write_text("\n".join(lines[:1] + lines[2:]))
        expected["rows"] = {"7": expected["rows"]["7"]}
    out = run_prepare(tokenizer, source, "data.skip_broken_lines=true")
    trained, reasons = out.trained(tokenizer), out.reasons()
    for row_id, row in expected["rows"].items():
        if row["status"] == "dropped":
            assert reasons[row_id].split(": ")[0] == row["reason"], row_id
            assert row_id not in trained
            continue
        assert row_id not in reasons
        sample = next(s for s in out.samples if s.sample_id == row_id)
        assert trained[row_id] == row.get("trained", trained[row_id])
        assert sample.loss_mask.sum() == row.get("trainable_tokens", sample.loss_mask.sum())
        whole = tokenizer.decode(sample.input_ids)
        assert row.get("input_contains", "") in whole
        assert "input_lacks" not in row or row["input_lacks"] not in whole
        if row.get("warn"):
            assert out.manifest["warnings"][row["warn"]]
    for never in expected.get("never", []):
        assert not any(never in span for spans in trained.values() for span in spans)
    if "totals" in expected:
        counts = out.manifest["counts"]
        kept = counts["train_conversations"] + counts["held_out_conversations"]
        assert {"read": out.manifest["num_read"], "kept": kept, "dropped": len(out.drops)} == expected[
            "totals"
        ]
    if "token_checks" in expected:
        assert all(s.input_ids[0] == expected["token_checks"]["first_id"] for s in out.samples)
        assert all(s.input_ids[s.loss_mask][-1] == 2 for s in out.samples)


def test_all_rows_dropped_is_an_error_that_names_the_reason_and_writes_no_data(
    shared: Path, smollm2: Any, run_prepare: Prepare, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="no_assistant_turn: 2") as caught:
        run_prepare(smollm2, shared / "cases" / "03b_all_rows_dropped.jsonl")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run" / "prepared").exists()
    assert len((tmp_path / "run" / "prepared-drops.jsonl").read_text().splitlines()) == 2


def test_a_refused_data_set_can_be_mended_without_fresh(
    smollm2: Any, run_prepare: Prepare, tmp_path: Path
) -> None:
    with pytest.raises(UserError):
        run_prepare(smollm2, [{"messages": []}])
    assert run_prepare(smollm2, [_said("q", "r")]).manifest["num_read"] == 1


def test_each_reasoning_turn_is_trained_as_it_was_served(
    shared: Path, smollm2: Any, run_prepare: Prepare
) -> None:
    expected = _load(shared, "12_reasoning_in_earlier_turns")
    tokenizer = _tokenizer(shared, smollm2, expected)
    out = run_prepare(tokenizer, shared / "cases" / "12_reasoning_in_earlier_turns.jsonl")
    assert [*out.trained(tokenizer).values()] == expected["rows"]["a"]["split"]
    assert [s.sample_id for s in out.samples] == ["a#0", "a#1"]


@pytest.mark.parametrize("run", ["P", "P+1", "N-1", "N"])
def test_truncation_at_the_answer(run: str, shared: Path, smollm2: Any, run_prepare: Prepare) -> None:
    source = shared / "cases" / "15_truncated_at_assistant.jsonl"
    expected = _load(shared, "15_truncated_at_assistant")["runs"][run]
    record = parse_row(Row("x", json.loads(source.read_text())), {}).record
    whole = ChatRenderer(smollm2, [2]).samples(record, 10_000)[0]
    num_prompt = int((~whole.loss_mask).sum())
    length = {"P": num_prompt, "P+1": num_prompt + 1, "N-1": len(whole) - 1, "N": len(whole)}[run]
    if expected["status"] == "dropped":
        with pytest.raises(UserError, match=expected["reason"]):
            run_prepare(smollm2, source, f"data.max_length={length}")
        return
    sample = run_prepare(smollm2, source, f"data.max_length={length}").samples[0]
    assert len(sample.input_ids) == len(sample.loss_mask) == length
    assert sample.loss_mask.sum() == expected.get("trainable_tokens", sample.loss_mask.sum())
    assert (sample.input_ids[-1] == 2) == expected.get("ends_with_eot", False)
    assert sample.cut != expected.get("ends_with_eot", False)


def test_broken_lines_are_an_error_that_names_them_unless_told_to_skip(
    shared: Path, smollm2: Any, run_prepare: Prepare
) -> None:
    expected = _load(shared, "21_malformed_jsonl")
    source = shared / "cases" / "21_malformed_jsonl.jsonl"
    with pytest.raises(UserError, match="3 broken lines") as caught:
        run_prepare(smollm2, source)
    for line in expected["bad_lines"]:
        assert f"{source}:{line}" in caught.value.what
    out = run_prepare(smollm2, source, "data.skip_broken_lines=true")
    assert [int(d.source.rpartition(":")[2]) for d in out.drops] == expected["bad_lines"]
    assert out.manifest["num_read"] == 5  # the blank line is no row


def test_one_id_with_two_texts_is_an_error_that_names_both(
    shared: Path, smollm2: Any, run_prepare: Prepare
) -> None:
    source = shared / "cases" / "22_identity_and_duplicates.jsonl"
    with pytest.raises(UserError, match="'a' and different text") as caught:
        run_prepare(smollm2, source)
    assert f"{source}:1" in caught.value.what
    assert f"{source}:2" in caught.value.what


def test_a_role_map_turns_an_unknown_role_into_a_known_one(
    shared: Path, smollm2: Any, run_prepare: Prepare
) -> None:
    expected = _load(shared, "07_unknown_role")
    out = run_prepare(
        smollm2,
        shared / "cases" / "07_unknown_role.jsonl",
        f"data.role_map={json.dumps(expected['with_role_map'])}",
    )
    assert out.trained(smollm2)["a"] == expected["then"]["a"]["trained"]


def test_a_tiny_vocabulary_is_filled_up(shared: Path, smollm2: Any, run_prepare: Prepare) -> None:
    expected = _load(shared, "28_tiny_vocabulary")
    out = run_prepare(smollm2, shared / "cases" / "28_tiny_vocabulary.jsonl")
    vocab = build_vocab_map(count_supervised(out.samples, 49152), expected["draft_vocab_size"], [2])
    assert len(vocab) == expected["mapping"]["len_d2t"]
    assert {2, *(int(i) for s in out.samples for i in s.input_ids[s.loss_mask])} <= set(
        vocab.target_ids.tolist()
    )


def test_the_split_covers_every_row_once(shared: Path, smollm2: Any, run_prepare: Prepare) -> None:
    pairs = json.loads((shared / "cases" / "30_split.expect.json").read_text())["pairs"]
    for n, ratio in ((p["n"], p["ratio"]) for p in pairs if p["n"] < 100):
        out = run_prepare(
            smollm2, [_said(f"q{i}", "r") for i in range(n)], f"data.validation_fraction={1 - ratio:.3f}"
        )
        counts = out.manifest["counts"]
        assert counts.get("train_conversations", 0) + counts.get("held_out_conversations", 0) == n
        assert len({s.sample_id for s in out.samples}) == n


def _said(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
