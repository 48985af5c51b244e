"""Shapes: every published spelling of a conversation is read, everything else is dropped with a reason."""

from typing import Any

import pytest

from eyas.data.records import RenderedText, TokenRow
from eyas.data.row_formats import Parsed, parse_row
from eyas.data.sources import Drop, Row
from eyas.types import Conversation, Message


def _parse(value: Any, **role_map: str) -> Parsed:
    return parse_row(Row("file:1", value), role_map)


def _messages(value: Any) -> tuple[Message, ...]:
    record = _parse(value).record
    assert isinstance(record, Conversation), record
    return record.messages


QA = (Message("user", "q"), Message("assistant", "r"))
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]}, "messages"),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}], "messages"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]}, "messages"),
        ({"conversation": [{"from": "Human", "value": "q"}, {"from": "BARD", "value": "r"}]}, "messages"),
        (
            {"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]'},
            "messages",
        ),
        ({"instruction": "q", "input": "", "output": "r"}, "alpaca"),
        ({"prompt": "q", "response": "r"}, "prompt and response"),
        ({"prompt": "q", "completion": "r"}, "prompt and response"),
        ({"question": "q", "answer": "r"}, "prompt and response"),
        (
            {
                "prompt": [{"role": "user", "content": "q"}],
                "completion": [{"role": "assistant", "content": "r"}],
            },
            "prompt and response",
        ),
    ],
)
def test_every_shape_of_one_question_and_answer_is_the_same_conversation(row: Any, shape: str) -> None:
    assert _messages(row) == QA
    assert _parse(row).shape == shape


def test_an_alpaca_input_follows_its_instruction_and_history_comes_first() -> None:
    row = {"instruction": "Sum up", "input": "text", "output": "r", "history": [["a", "b"]], "system": "s"}
    assert _messages(row) == (
        Message("system", "s"),
        Message("user", "a"),
        Message("assistant", "b"),
        Message("user", "Sum up\n\ntext"),
        Message("assistant", "r"),
    )


SYSTEM_KEYS = ["system", "system_prompt", "system_message", "systemPrompt", "system_instruction"]
ROWS_OF_ALL_FORMATS: list[dict[str, Any]] = [
    {"question": "q", "response": "r"},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]},
    {"instruction": "q", "output": "r"},
    {"instruction": "q", "response": "r"},
    {"prompt": [{"role": "user", "content": "q"}], "completion": "r"},
    {"input": "q", "output": "r"},
    {"input": [{"role": "user", "content": "q"}], "output": "r"},
]


@pytest.mark.parametrize("key", SYSTEM_KEYS)
@pytest.mark.parametrize("row", ROWS_OF_ALL_FORMATS, ids=lambda row: "+".join(row))
def test_a_system_prompt_in_a_column_is_the_system_message_in_every_format(key: str, row: Any) -> None:
    assert _messages({**row, key: "s"}) == (Message("system", "s"), *QA)
    assert _messages({**row, key: ""}) == QA
    assert _parse({**row, key: "s"}).unused_columns == ()


def test_a_conversations_own_system_message_goes_before_a_column_which_is_then_named() -> None:
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}]
    row = {"messages": messages, "system_prompt": "other"}
    assert _messages(row)[0] == Message("system", "own")
    assert _parse(row).unused_columns == ("system_prompt",)
    assert _parse({"messages": messages, "system_prompt": "own"}).unused_columns == ()
    assert _parse({"prompt": "q", "system": "a", "system_prompt": "b"}).unused_columns == ("system_prompt",)


@pytest.mark.parametrize("asked", ["instruction", "prompt", "question", "query"])
@pytest.mark.parametrize("context", ["context", "input"])
@pytest.mark.parametrize("answer", ["response", "output", "completion", "answer"])
def test_a_context_follows_what_is_asked_whatever_the_columns_are_called(
    asked: str, context: str, answer: str
) -> None:
    row = {asked: "q", context: "c", answer: "r", "category": "x"}
    assert _messages(row) == (Message("user", "q\n\nc"), Message("assistant", "r"))
    assert _parse(row).unused_columns == ("category",)


def test_history_comes_before_a_prompt() -> None:
    row = {"prompt": "q", "response": "r", "history": [["a", "b"]]}
    assert _messages(row) == (Message("user", "a"), Message("assistant", "b"), *QA)


def test_functions_of_the_older_format_are_tools() -> None:
    record = _parse({"messages": [{"role": "user", "content": "q"}], "functions": [{"name": "f"}]}).record
    assert isinstance(record, Conversation)
    assert record.tools == ({"type": "function", "function": {"name": "f"}},)


@pytest.mark.parametrize("key", ["assistant_masks", "assistant_tokens_mask", "completion_mask"])
def test_a_token_mask_is_read_under_its_names(key: str) -> None:
    record = _parse({"input_ids": [4, 5, 6], key: [0, 1, 1], "attention_mask": [1, 1, 1]}).record
    assert isinstance(record, TokenRow)
    assert record.loss_mask.tolist() == [False, True, True]


def test_labels_are_a_mask() -> None:
    record = _parse({"input_ids": [4, 5, 6], "labels": [-100, 5, 6]}).record
    assert isinstance(record, TokenRow)
    assert record.loss_mask.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"labels": [5, 6, -100]}, "labels_are_not_the_ids"),
        ({"labels": [-100, 5]}, "mask_length_mismatch"),
        ({"labels": "x"}, "bad_shape"),
        ({"loss_mask": [0, 1, 1], "labels": [-100, -100, 6]}, "masks_disagree"),
        ({"loss_mask": [0, 0.5, 1]}, "bad_shape"),
        ({"loss_mask": [0, 1, 1], "attention_mask": [0, 1, 1]}, "attention_mask_hides_tokens"),
    ],
)
def test_token_rows_whose_masks_are_not_one_mask_are_dropped(more: Any, reason: str) -> None:
    assert _parse({"input_ids": [4, 5, 6], **more}).record == Drop("file:1", "file:1", reason)


def test_prompts_alone_wait_for_an_answer() -> None:
    assert _messages({"prompt": "q"}) == QA[:1]
    assert _messages({"instruction": "q"}) == QA[:1]
    assert _messages({"turns": ["q", "again"]}) == (QA[0], Message("assistant", ""), Message("user", "again"))


def test_text_and_tokens_are_kept_as_they_are() -> None:
    text = _parse({"text": " rendered "}).record
    assert isinstance(text, RenderedText)
    assert text.text == " rendered "
    row = _parse({"id": 3, "input_ids": [1, 2, 3], "loss_mask": [0, True, 1]}).record
    assert isinstance(row, TokenRow)
    assert (row.conversation_id, row.input_ids.tolist(), row.loss_mask.tolist()) == (
        "3",
        [1, 2, 3],
        [False, True, True],
    )


def test_content_parts_are_joined_and_their_thoughts_are_reasoning() -> None:
    parts = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]
    assert _messages({"messages": [{"role": "assistant", "content": parts}]}) == (
        Message("assistant", "ab", reasoning="hm"),
    )


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_found_under_its_names(key: str) -> None:
    message = {"role": "assistant", "content": "r", key: "hm"}
    assert _messages({"messages": [message]}) == (Message("assistant", "r", reasoning="hm"),)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {
            "role": "assistant",
            "tool_calls": '[{"type": "function", "function": {"name": "f", "arguments": "{}"}}]',
        },
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{}"}]},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"from": "function_call", "value": '{"name": "f", "arguments": "{}"}'},
    ],
)
def test_every_spelling_of_a_tool_call_is_the_same_call(message: Any) -> None:
    assert _messages({"messages": [message]}) == (Message("assistant", "", tool_calls=(CALL,)),)


def test_a_tool_result_keeps_its_name_and_the_call_it_answers() -> None:
    result = {"role": "tool", "content": "4", "name": "f", "tool_call_id": "c1"}
    assert _messages({"messages": [result]}) == (Message("tool", "4", name="f", tool_call_id="c1"),)
    assert _messages({"messages": [{"from": "observation", "value": "4"}]}) == (Message("tool", "4"),)


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]', {"name": "f"}])
def test_tools_may_be_objects_or_json_text(tools: Any) -> None:
    record = _parse({"messages": [{"role": "user", "content": "q"}], "tools": tools}).record
    assert isinstance(record, Conversation)
    assert record.tools == ({"name": "f"},)


def test_json_that_a_person_typed_stays_text() -> None:
    assert _messages({"prompt": '[{"a": 1}]'}) == (Message("user", '[{"a": 1}]'),)


def test_an_answer_that_met_its_limit_is_marked() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
    assert [m.cut for m in _messages({"messages": messages, "finish_reason": "length"})] == [False, True]
    assert [m.cut for m in _messages({"messages": messages, "finish_reason": "stop"})] == [False, False]
    messages[1]["finish_reason"] = "length"
    assert [m.cut for m in _messages({"messages": messages})] == [False, True]


def test_a_row_without_an_id_is_known_by_what_it_says_and_not_by_its_place_or_scores() -> None:
    row = {"messages": [{"role": "user", "content": "q"}]}
    first = parse_row(Row("a:1", row), {}).record
    second = parse_row(Row("b:9", {**row, "score": 3, "id": None}), {}).record
    other = parse_row(Row("a:2", {"messages": [{"role": "user", "content": "q!"}]}), {}).record
    assert isinstance(first, Conversation)
    assert isinstance(second, Conversation)
    assert isinstance(other, Conversation)
    assert first.conversation_id == second.conversation_id != other.conversation_id


def test_a_role_map_goes_before_the_known_names() -> None:
    row = {"messages": [{"role": "robot", "content": "x"}, {"role": "gpt", "content": "y"}]}
    record = _parse(row, robot="assistant", gpt="user").record
    assert isinstance(record, Conversation)
    assert [m.role for m in record.messages] == ["assistant", "user"]


USER = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("hello", "bad_shape"),
        (7, "bad_shape"),
        ({}, "missing_messages"),
        ({"body": "x"}, "missing_messages"),
        ({"messages": None}, "empty_conversation"),
        ({"messages": []}, "empty_conversation"),
        ({"conversations": []}, "empty_conversation"),
        ({"messages": {"role": "user"}}, "bad_shape"),
        ({"messages": ["hello"]}, "bad_shape"),
        ({"messages": [{"content": "x"}]}, "bad_shape"),
        ({"messages": [{"role": 3, "content": "x"}]}, "bad_shape"),
        ({"messages": [{"role": "user", "content": 3}]}, "bad_shape"),
        ({"messages": [{"role": "user"}]}, "missing_content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "missing_content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "unknown_role:robot"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "unsupported_content:image_url",
        ),
        ({"messages": [USER], "tools": "not json"}, "bad_tools"),
        ({"messages": [USER], "tools": ["f"]}, "bad_tools"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]}, "bad_tool_call"),
        ({"messages": [{"from": "function_call", "value": ""}]}, "bad_tool_call"),
        ({"text": "  "}, "empty_conversation"),
        ({"text": 3}, "bad_shape"),
        ({"input_ids": [1, 2]}, "missing_loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "mask_length_mismatch"),
        ({"input_ids": [1, -2], "loss_mask": [1, 1]}, "token_id_out_of_range"),
        ({"input_ids": [1, "2"], "loss_mask": [1, 1]}, "bad_shape"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "bad_shape"),
        ({"prompt": None, "response": "r"}, "missing_messages"),
    ],
)
def test_what_is_no_conversation_is_dropped_with_its_reason(row: Any, reason: str) -> None:
    assert _parse(row).record == Drop("file:1", "file:1", reason)
