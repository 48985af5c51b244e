"""The formats that conversations are published in, each made into one record or dropped with a reason."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from eyas.data.fields import BadRow, Fields
from eyas.data.messages import decoded, read_content, read_message, read_objects
from eyas.data.records import Record, RenderedText
from eyas.data.sources import Drop, Row
from eyas.data.token_rows import read_token_row
from eyas.data.training_flags import says_trained
from eyas.types import Conversation, Message

_MESSAGE_KEYS = ("messages", "conversations", "conversation")
_PROMPT_KEYS = ("prompt", "question", "query", "input")
_RESPONSE_KEYS = ("response", "completion", "answer", "output")
_SYSTEM_KEYS = ("system", "system_prompt", "system_message", "systemPrompt", "system_instruction")


@dataclass(frozen=True)
class Parsed:
    """A record or a drop, the format that was recognised, and a hash of what the record says.

    ``unused_columns`` and ``unused_message_keys`` name what was not read, a key once for each message.
    """

    record: Record | Drop
    shape: str
    said: str = ""
    unused_columns: tuple[str, ...] = ()
    unused_message_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Given:
    """A row on its way to a record."""

    fields: Fields
    row_id: str
    place: str
    role_map: Mapping[str, str]
    ignored: Collection[str]
    unused_message_keys: list[str]

    def text(self, content: Any) -> str:
        return read_content(content, self.role_map, self.ignored, self.unused_message_keys)[0]


def parse_row(row: Row, role_map: Mapping[str, str], ignore_keys: Collection[str] = ()) -> Parsed:
    """Recognise a row's format and read it.

    ``role_map`` adds to the known role names. Rows and messages are read as if they had no ``ignore_keys``.
    """
    value = {"messages": row.value} if isinstance(row.value, list) else row.value
    if not isinstance(value, Mapping):
        return Parsed(Drop(row.place, row.place, "bad_shape"), "unknown")
    fields = Fields(value, ignore_keys)
    row_id = fields.take("id")
    row_id = "" if row_id is None else str(row_id)
    shape = _shape_of(fields)
    given = _Given(fields, row_id, row.place, role_map, ignore_keys, [])
    record, said = _read(given, shape)
    return Parsed(record, shape, said, tuple(fields.unread()), tuple(given.unused_message_keys))


def _read(given: _Given, shape: str) -> tuple[Record | Drop, str]:
    row_id, place = given.row_id, given.place
    try:
        record = _READERS[shape](given)
        if says_trained(given.fields, given.role_map) is False:
            raise BadRow("marked_not_trained")
        said = _said(record)
        row_id.encode()
    except BadRow as error:
        return Drop(row_id or place, place, str(error)), ""
    except UnicodeEncodeError:  # half a surrogate pair, which no server's JSON could carry
        return Drop(place, place, "invalid_unicode"), ""
    # A row without an id is known by what it says, so that its id survives re-ordering of the source.
    return (record if row_id else dataclasses.replace(record, conversation_id=said[:16])), said


def _said(record: Record) -> str:
    if isinstance(record, Conversation):
        said: Any = [[m.to_json() for m in record.messages], list(record.tools)]
    elif isinstance(record, RenderedText):
        said = record.text
    else:
        said = [record.input_ids.tolist(), record.loss_mask.tolist()]
    text = json.dumps(said, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _shape_of(row: Fields) -> str:
    if row.has("input_ids"):
        return "tokens"
    if row.has(*_MESSAGE_KEYS):
        return "messages"
    if row.has("instruction"):
        return "alpaca"
    if row.has(*_PROMPT_KEYS[:-1]):
        return "prompt and response" if row.has(*_RESPONSE_KEYS) else "prompt"
    if row.has("turns"):
        return "turns"
    if row.has("text"):
        return "text"
    if row.has("input"):
        return "prompt and response" if row.has(*_RESPONSE_KEYS) else "prompt"
    return "unknown"


def _read_unknown(given: _Given) -> Record:
    named = any(key in given.fields for key in _MESSAGE_KEYS)
    given.fields.take(*_MESSAGE_KEYS)
    raise BadRow("empty_conversation" if named else "missing_messages")


def _read_tokens(given: _Given) -> Record:
    return read_token_row(given.fields, given.row_id, given.place)


def _read_text(given: _Given) -> Record:
    text = given.fields.take("text")
    if not isinstance(text, str):
        raise BadRow("bad_shape")
    if not text.strip():
        raise BadRow("empty_conversation")
    return RenderedText(given.row_id, text, given.place)


def _read_messages(given: _Given) -> Record:
    return _conversation(given, decoded(given.fields.take(*_MESSAGE_KEYS)))


def _read_alpaca(given: _Given) -> Record:
    """Read an instruction with its input (Alpaca) or context (Dolly) behind it."""
    fields = given.fields
    asked = _with_context(given, fields.take("instruction"), "input", "context")
    answer = fields.take("output", *_RESPONSE_KEYS)
    history = _history(fields.take("history"))
    return _conversation(given, history + _as_messages(asked, "user") + _as_messages(answer, "assistant"))


def _read_prompt(given: _Given) -> Record:
    fields = given.fields
    asked: Any = fields.take(*_PROMPT_KEYS)
    if isinstance(asked, str):
        asked = _with_context(given, asked, "input", "context")
    answer = fields.take(*_RESPONSE_KEYS)
    history = _history(fields.take("history"))
    return _conversation(given, history + _as_messages(asked, "user") + _as_messages(answer, "assistant"))


def _read_turns(given: _Given) -> Record:
    """Read a user's turns; an empty answer between two marks the position at which the target speaks."""
    turns = given.fields.take("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise BadRow("bad_shape")
    messages: list[Any] = []
    for turn in turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
    return _conversation(given, messages[:-1])


_READERS: dict[str, Callable[[_Given], Record]] = {
    "tokens": _read_tokens,
    "messages": _read_messages,
    "alpaca": _read_alpaca,
    "prompt and response": _read_prompt,
    "prompt": _read_prompt,
    "turns": _read_turns,
    "text": _read_text,
    "unknown": _read_unknown,
}


def _with_context(given: _Given, asked: Any, *keys: str) -> str:
    """Return a question with the texts of further columns behind it, a blank line before each."""
    parts = [given.text(asked)]
    for key in keys:
        is_text = key == "input" or isinstance(given.fields.peek(key), str | None)
        if is_text and given.fields.is_unread(key):
            parts.append(given.text(given.fields.take(key) or ""))
    return "\n\n".join(part for part in parts if part)


def _history(pairs: Any) -> list[Any]:
    """Return the messages of earlier turns, which are pairs of question and answer."""
    pairs = pairs or []
    if not isinstance(pairs, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise BadRow("bad_shape")
    roles = ("user", "assistant")
    return [{"role": r, "content": c} for pair in pairs for r, c in zip(roles, pair, strict=True)]


def _as_messages(value: Any, role: str) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _conversation(given: _Given, values: Any) -> Conversation:
    fields = given.fields
    tools, functions = fields.take("tools"), None
    if tools is None:
        functions = fields.take("functions")
    met_limit = fields.take("finish_reason") == "length"
    if not isinstance(values, list):
        raise BadRow("bad_shape")
    if not values:
        raise BadRow("empty_conversation")
    messages = _messages(given, values)
    messages = _system(given, messages) + messages
    if met_limit and messages[-1].role == "assistant":
        messages[-1] = dataclasses.replace(messages[-1], cut=True)
    # The older column holds the functions themselves.
    found = read_objects(tools) or tuple({"type": "function", "function": f} for f in read_objects(functions))
    return Conversation(given.row_id, tuple(messages), given.place, found)


def _messages(given: _Given, values: list[Any]) -> list[Message]:
    """Read every message, so that the keys of all are known, and then say what is wrong with the first."""
    messages: list[Message] = []
    trouble: BadRow | None = None
    for value in values:
        try:
            messages.append(read_message(value, given.role_map, given.ignored, given.unused_message_keys))
        except BadRow as error:
            trouble = trouble or error
    if trouble is not None:
        raise trouble
    return messages


def _system(given: _Given, messages: list[Message]) -> list[Message]:
    """Return the system message that a column holds; a conversation's own goes before it.

    A column with another text than the system message in use stays unread, and is named as such.
    """
    own = messages[0].content if messages[0].role == "system" else None
    system = own
    for key in _SYSTEM_KEYS:
        value = given.fields.peek(key)
        text = given.text(value) if value else ""
        if not text or system in (None, text):
            given.fields.take(key)
            system = system or text or None
    return [Message("system", system)] if own is None and system is not None else []
