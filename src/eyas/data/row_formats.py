"""The shapes that conversations are published in, each made into one record or dropped with a reason."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.data.sources import Drop, Row
from eyas.types import ROLES, Conversation, Message

# Spellings of ShareGPT and its descendants. ``function_call`` is an assistant turn that holds only a call.
_ROLE_NAMES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
_MESSAGE_KEYS = ("messages", "conversations", "conversation")
_PROMPT_KEYS = ("prompt", "question", "query")
_RESPONSE_KEYS = ("response", "completion", "answer", "output")


@dataclass(frozen=True)
class RenderedText:
    """A conversation that was already rendered with some chat template."""

    conversation_id: str
    text: str
    source: str


@dataclass(frozen=True)
class TokenRow:
    """Tokens and mask that the data brings along: [T] each, as they came."""

    conversation_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    source: str


Record = Conversation | RenderedText | TokenRow


@dataclass(frozen=True)
class Parsed:
    """A record or a drop, the shape that was recognised, and a hash of what the record says."""

    record: Record | Drop
    shape: str
    said: str = ""


class _BadRow(ValueError):
    """The row cannot be used; its text is the reason."""


def parse_row(row: Row, role_map: Mapping[str, str]) -> Parsed:
    """Recognise a row's shape and read it; ``role_map`` adds to the known role names."""
    value = {"messages": row.value} if isinstance(row.value, list) else row.value
    if not isinstance(value, Mapping):
        return Parsed(Drop(row.place, row.place, "bad_shape"), "unknown")
    given = value.get("id")
    row_id = "" if given is None else str(given)
    shape = _shape_of(value)
    try:
        record = _READERS[shape](value, row_id, row.place, role_map)
        said = _said(record)
        row_id.encode()
    except _BadRow as error:
        return Parsed(Drop(row_id or row.place, row.place, str(error)), shape)
    except UnicodeEncodeError:  # half a surrogate pair, which no server's JSON could carry
        return Parsed(Drop(row.place, row.place, "invalid_unicode"), shape)
    # A row without an id is known by what it says, so that its id survives re-ordering of the source.
    named = record if row_id else dataclasses.replace(record, conversation_id=said[:16])
    return Parsed(named, shape, said)


def _said(record: Record) -> str:
    if isinstance(record, Conversation):
        said: Any = [[vars(m) for m in record.messages], list(record.tools)]
    elif isinstance(record, TokenRow):
        said = [record.input_ids.tolist(), record.loss_mask.tolist()]
    else:
        said = record.text
    text = json.dumps(said, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _shape_of(row: Mapping[str, Any]) -> str:
    def has(*keys: str) -> bool:
        return any(row.get(key) is not None for key in keys)

    if has("input_ids"):
        return "tokens"
    if has(*_MESSAGE_KEYS):
        return "messages"
    if has("instruction"):
        return "alpaca"
    if has(*_PROMPT_KEYS):
        return "prompt and response" if has(*_RESPONSE_KEYS) else "prompt"
    if has("turns"):
        return "turns"
    if has("text"):
        return "text"
    return "unknown"


def _read_unknown(row: Mapping[str, Any], row_id: str, place: str, role_map: Mapping[str, str]) -> Record:
    raise _BadRow("empty_conversation" if any(key in row for key in _MESSAGE_KEYS) else "missing_messages")


def _read_tokens(row: Mapping[str, Any], row_id: str, place: str, role_map: Mapping[str, str]) -> Record:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if mask is None:
        raise _BadRow("missing_loss_mask")
    if not _all_integers(ids) or not isinstance(mask, list) or any(m not in (0, 1) for m in mask):
        raise _BadRow("bad_shape")
    if len(ids) != len(mask):
        raise _BadRow("mask_length_mismatch")
    if any(not 0 <= i < 2**31 for i in ids):
        raise _BadRow("token_id_out_of_range")
    return TokenRow(row_id, np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=bool), place)


def _read_text(row: Mapping[str, Any], row_id: str, place: str, role_map: Mapping[str, str]) -> Record:
    text = row["text"]
    if not isinstance(text, str):
        raise _BadRow("bad_shape")
    if not text.strip():
        raise _BadRow("empty_conversation")
    return RenderedText(row_id, text, place)


def _read_messages(row: Mapping[str, Any], row_id: str, place: str, role_map: Mapping[str, str]) -> Record:
    messages = next(row[key] for key in _MESSAGE_KEYS if row.get(key) is not None)
    return _conversation(_decoded(messages), row, row_id, place, role_map)


def _read_alpaca(row: Mapping[str, Any], row_id: str, place: str, role_map: Mapping[str, str]) -> Record:
    parts = [_text(row["instruction"]), _text(row.get("input") or "")]
    messages = [{"role": "user", "content": "\n\n".join(part for part in parts if part)}]
    if row.get("output") is not None:
        messages.append({"role": "assistant", "content": row["output"]})
    history = row.get("history") or []
    if not isinstance(history, list) or any(not isinstance(h, list) or len(h) != 2 for h in history):
        raise _BadRow("bad_shape")
    roles = ("user", "assistant")
    before = [{"role": r, "content": c} for pair in history for r, c in zip(roles, pair, strict=True)]
    return _conversation(before + messages, row, row_id, place, role_map)


def _read_prompt(row: Mapping[str, Any], row_id: str, place: str, role_map: Mapping[str, str]) -> Record:
    prompt = next(row[key] for key in _PROMPT_KEYS if row.get(key) is not None)
    response = next((row[key] for key in _RESPONSE_KEYS if row.get(key) is not None), None)
    messages = _as_messages(prompt, "user") + _as_messages(response, "assistant")
    return _conversation(messages, row, row_id, place, role_map)


def _read_turns(row: Mapping[str, Any], row_id: str, place: str, role_map: Mapping[str, str]) -> Record:
    """Read a user's turns; an empty answer between two marks the place where the target speaks."""
    turns = row["turns"]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise _BadRow("bad_shape")
    messages: list[Any] = []
    for turn in turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
    return _conversation(messages[:-1], row, row_id, place, role_map)


_READERS = {
    "tokens": _read_tokens,
    "messages": _read_messages,
    "alpaca": _read_alpaca,
    "prompt and response": _read_prompt,
    "prompt": _read_prompt,
    "turns": _read_turns,
    "text": _read_text,
    "unknown": _read_unknown,
}


def _as_messages(value: Any, role: str) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _conversation(
    messages: Any, row: Mapping[str, Any], row_id: str, place: str, role_map: Mapping[str, str]
) -> Conversation:
    if not isinstance(messages, list):
        raise _BadRow("bad_shape")
    if not messages:
        raise _BadRow("empty_conversation")
    parsed = [_message(m, role_map) for m in messages]
    if row.get("system") and parsed[0].role != "system":
        parsed.insert(0, Message("system", _text(row["system"])))
    if row.get("finish_reason") == "length" and parsed[-1].role == "assistant":
        parsed[-1] = dataclasses.replace(parsed[-1], cut=True)
    return Conversation(row_id, tuple(parsed), place, _objects(row.get("tools")))


def _message(value: Any, role_map: Mapping[str, str]) -> Message:
    if not isinstance(value, Mapping):
        raise _BadRow("bad_shape")
    name = value.get("role", value.get("from"))
    if not isinstance(name, str):
        raise _BadRow("bad_shape")
    role = role_map.get(name) or _ROLE_NAMES.get(name.strip().lower(), name.strip().lower())
    if role not in ROLES:
        raise _BadRow(f"unknown_role:{name}")
    content = value["content"] if "content" in value else value.get("value")
    calls = _tool_calls(value, name, content)
    if name == "function_call":
        content = ""
    reasoning = next((value[k] for k in ("reasoning_content", "reasoning", "thinking") if value.get(k)), None)
    if reasoning is not None and not isinstance(reasoning, str):
        raise _BadRow("bad_shape")
    if content is None and (calls or reasoning):
        content = ""
    if isinstance(content, list):
        thoughts = "".join(str(p.get("thinking", "")) for p in content if _part_type(p) == "thinking")
        reasoning = reasoning or thoughts or None
    spoken_by, call_id = value.get("name"), value.get("tool_call_id")
    return Message(
        role,
        _text(content),
        reasoning,
        calls,
        name=None if spoken_by is None else str(spoken_by),
        tool_call_id=None if call_id is None else str(call_id),
        cut=role == "assistant" and value.get("finish_reason") == "length",
    )


def _text(content: Any) -> str:
    """Return a message's text; the text parts of a list are joined, other parts have no tokens here."""
    if isinstance(content, str):
        return content
    if content is None:
        raise _BadRow("missing_content")
    if not isinstance(content, list):
        raise _BadRow("bad_shape")
    texts = []
    for part in content:
        kind = _part_type(part)
        if kind == "text":
            text = part if isinstance(part, str) else part.get("text")
            if not isinstance(text, str):
                raise _BadRow("missing_content")
            texts.append(text)
        elif kind != "thinking":
            raise _BadRow(f"unsupported_content:{kind}")
    return "".join(texts)


def _part_type(part: Any) -> str:
    if isinstance(part, str):
        return "text"
    if not isinstance(part, Mapping):
        raise _BadRow("bad_shape")
    kind = str(part.get("type", "text"))
    return "text" if kind in ("input_text", "output_text") else kind


def _tool_calls(value: Mapping[str, Any], role_name: str, content: Any) -> tuple[Mapping[str, Any], ...]:
    """Read calls in the OpenAI shape, its older ``function_call``, or ShareGPT's turn of that role."""
    calls = list(_objects(value.get("tool_calls")))
    if value.get("function_call"):
        calls += _objects(value["function_call"])
    if role_name == "function_call":
        calls += _objects(content)
        if not calls:
            raise _BadRow("bad_tool_call")
    return tuple(_tool_call(call) for call in calls)


def _tool_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if "function" not in call:
        known = {k: call[k] for k in ("name", "arguments") if k in call}
        call = {"type": "function", **{k: v for k, v in call.items() if k not in known}, "function": known}
    function = call["function"]
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _BadRow("bad_tool_call")
    return call


def _objects(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Read a list of objects, one object, or either as JSON text."""
    value = _decoded(value)
    if value is None or value == "":
        return ()
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or not all(isinstance(v, Mapping) for v in value):
        raise _BadRow("bad_tools")
    return tuple(value)


def _decoded(value: Any) -> Any:
    """Decode a list or object that was stored as JSON text; leave everything else."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _all_integers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in values)
