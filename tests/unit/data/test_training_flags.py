"""A key that says what is learnt is obeyed, or its row is refused; it is never ignored."""

from typing import Any

import pytest

from data_support import Prepare, make_tokenizer
from eyas.data.row_formats import parse_row
from eyas.data.sources import Drop, Row
from eyas.types import Conversation

TOKENIZER = make_tokenizer()
ASKED, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}


def _row(**flags: Any) -> dict[str, Any]:
    return {"messages": [ASKED, {**ANSWER, **flags}, ASKED, {"role": "assistant", "content": "last"}]}


def _trained(row: Any, ignore_keys: tuple[str, ...] = ()) -> list[bool]:
    record = parse_row(Row("file:1", row), {}, ignore_keys).record
    assert isinstance(record, Conversation), record
    return [m.trained for m in record.messages if m.role == "assistant"]


def _reason(row: Any) -> str:
    record = parse_row(Row("file:1", row), {}).record
    assert isinstance(record, Drop), record
    return record.reason


OFF: list[dict[str, Any]] = [
    {"weight": 0}, {"weight": 0.0}, {"weight": "0"}, {"Weight": 0}, {"train": False}, {"train": "false"},
    {"training": False}, {"trainable": False}, {"is_trained": False}, {"isTrained": False},
    {"train_on_turn": False},
    {"loss": False}, {"loss": 0}, {"loss_mask": 0}, {"loss_weight": 0}, {"lossScale": 0},
    {"step_loss_mask": 0},
    {"supervise": False}, {"supervised": False}, {"learn": False}, {"masked": True}, {"no_loss": True},
    {"ignore_loss": 1}, {"do_not_train": "yes"}, {"skip-training": True},
]  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"weight": 0.5}, "weight_not_0_or_1:weight"),
    ({"weight": 2}, "weight_not_0_or_1:weight"),
    ({"weight": -1}, "weight_not_0_or_1:weight"),
    ({"weight": "half"}, "unclear_training_flag:weight"),
    ({"weight": [0, 1]}, "unclear_training_flag:weight"),
    ({"loss": {"scale": 0}}, "unclear_training_flag:loss"),
    ({"train_detail": [{"begin_offset": 0, "train": False}]}, "partly_trained_turn:train_detail"),
    ({"train": True, "weight": 0}, "training_flags_disagree"),
    ({"mask": True}, "unclear_training_flag:mask"),
    ({"mask": 0}, "unclear_training_flag:mask"),
    ({"ignore": True}, "unclear_training_flag:ignore"),
    ({"my_loss_factor": 0.3}, "unclear_training_flag:my_loss_factor"),
    ({"useForTraining": False}, "unclear_training_flag:useForTraining"),
]  # fmt: skip


@pytest.mark.parametrize("flag", OFF, ids=str)
def test_a_message_marked_not_to_be_trained_is_context_only(flag: dict[str, Any]) -> None:
    assert _trained(_row(**flag)) == [False, True]


@pytest.mark.parametrize(
    "flag", [{"weight": 1}, {"train": True}, {"loss": 1.0}, {"masked": False}, {"weight": None}]
)
def test_a_flag_that_trains_changes_nothing(flag: dict[str, Any]) -> None:
    assert _trained(_row(**flag)) == [True, True]
    assert _trained({**_row(), **flag}) == [True, True]


@pytest.mark.parametrize("flag", OFF, ids=str)
@pytest.mark.parametrize(
    "row",
    [
        _row(),
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]},
        {"instruction": "q", "output": "r"},
        {"instruction": "q", "context": "c", "response": "r"},
        {"system_prompt": "s", "question": "q", "response": "r"},
        {"prompt": "q", "completion": "r"},
        {"prompt": "q"},
        {"turns": ["q", "p"]},
        {"text": "<|im_start|>assistant\nr<|im_end|>"},
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
    ],
    ids=lambda row: "+".join(row),
)
def test_a_row_marked_not_to_be_trained_is_dropped_in_every_format(flag: Any, row: Any) -> None:
    # A token row's loss_mask is its mask.
    if "input_ids" in row and "loss_mask" in flag:
        return
    assert _reason({**row, **flag}) == "marked_not_trained"


@pytest.mark.parametrize(("flag", "reason"), REFUSED, ids=str)
def test_a_flag_that_cannot_be_obeyed_refuses_its_row(flag: dict[str, Any], reason: str) -> None:
    assert _reason(_row(**flag)) == reason
    assert _reason({**_row(), **flag}) == reason


def test_a_flag_of_a_part_of_a_message_refuses_the_row() -> None:
    part = {"type": "text", "text": "r", "train": False}
    assert _reason({"messages": [ASKED, {**ANSWER, "content": [part]}]}) == "partly_trained_turn:content"


def test_the_users_text_is_not_trained_on_whatever_a_flag_says() -> None:
    assert _reason({"messages": [{**ASKED, "train": True}, ANSWER]}) == "trained_role:user"
    assert _trained({"messages": [{**ASKED, "train": False}, ANSWER]}) == [True]


def test_a_mask_that_names_the_user_is_what_happens_anyway() -> None:
    assert _trained({**_row(), "mask": "User"}) == [True, True]
    assert _trained({**_row(), "mask": "human"}) == [True, True]
    assert _reason({**_row(), "mask": "Assistant"}) == "unclear_training_flag:mask"


def test_a_text_column_whose_name_resembles_a_flag_is_only_named() -> None:
    parsed = parse_row(Row("a:1", {**_row(), "used_in_training": "yes", "training_source": "web"}), {})
    assert isinstance(parsed.record, Conversation)
    assert parsed.unused_columns == ("used_in_training", "training_source")


def test_ignored_keys_are_read_neither_as_flags_nor_as_text() -> None:
    assert _trained(_row(weight=0.3), ("weight",)) == [True, True]
    row = {**_row(loss=0), "loss": 1.7, "system": "s"}
    assert _trained(row, ("loss", "system")) == [True, True]


def test_an_untrained_turn_gets_no_mask_and_stays_in_the_context(run_prepare: Prepare) -> None:
    out = run_prepare(TOKENIZER, [{"id": "a", **_row(weight=0)}])
    (sample,) = out.samples
    assert out.trained(TOKENIZER)["a"] == ["last<|im_end|>"]
    assert "<|im_start|>assistant\nr<|im_end|>" in TOKENIZER.decode(sample.input_ids)


def test_a_row_with_no_turn_left_to_train_is_dropped_with_a_reason(run_prepare: Prepare) -> None:
    untrained = {"id": "none", "messages": [ASKED, {**ANSWER, "train": False}]}
    out = run_prepare(TOKENIZER, [{"id": "a", **_row()}, untrained, {"id": "row", **_row(), "weight": 0}])
    assert out.reasons() == {"none": "marked_not_trained", "row": "marked_not_trained"}


def test_prompts_whose_answers_are_all_context_only_are_dropped(run_prepare: Prepare) -> None:
    rows = [{"id": "a", **_row(weight=0)}, {"id": "none", "messages": [ASKED, {**ANSWER, "train": False}]}]
    out = run_prepare(TOKENIZER, rows, "regenerate.enabled=true")
    assert out.reasons() == {"none": "marked_not_trained"}


def test_flags_do_not_change_the_id_of_a_row_without_them() -> None:
    plain, flagged = (parse_row(Row("a:1", _row(**flag)), {}).record for flag in ({}, {"weight": 1}))
    untrained = parse_row(Row("a:1", _row(weight=0)), {}).record
    assert isinstance(plain, Conversation)
    assert isinstance(flagged, Conversation)
    assert isinstance(untrained, Conversation)
    assert plain.conversation_id == flagged.conversation_id == "0c6681308fa51402"
    assert untrained.conversation_id != plain.conversation_id
