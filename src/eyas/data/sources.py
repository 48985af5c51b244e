"""Conversation files become Conversations; what cannot is dropped with a reason, never in silence."""

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.types import Conversation, Message


@dataclass(frozen=True)
class Drop:
    """A row that did not become a conversation or sample, and why."""

    row_id: str
    source: str
    reason: str


def read_sources(paths: Iterable[str]) -> Iterator[Conversation | Drop]:
    """Read JSONL files (also gzipped): rows with ``messages``, or a ``prompt`` text.

    Raises: UserError when a file is missing.
    """
    for path in paths:
        yield from _read_jsonl(Path(path))


def _read_jsonl(path: Path) -> Iterator[Conversation | Drop]:
    if not path.is_file():
        raise UserError(f"there is no data file {path}", hint="set data.sources to existing JSONL files")
    opened = gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
    with opened as lines:
        for number, raw in enumerate(lines, start=1):
            place = f"{path.name}:{number}"
            try:
                # utf-8-sig: a byte order mark in front of the first line is not data.
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                row = json.loads(text) if text else None
            except (UnicodeDecodeError, json.JSONDecodeError):
                yield Drop(place, str(path), "broken line")
                continue
            if row is not None:
                yield _to_conversation(row, place, str(path))


def _to_conversation(row: Any, place: str, source: str) -> Conversation | Drop:
    if not isinstance(row, dict):
        return Drop(place, source, "not an object")
    row_id = str(row["id"]) if row.get("id") is not None else _content_id(row)
    if "prompt" in row and "messages" not in row:
        row = {"messages": [{"role": "user", "content": row["prompt"]}]}
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return Drop(row_id, source, "no messages")
    try:
        parsed = tuple(_to_message(m) for m in messages)
        return Conversation(row_id, parsed, source, tuple(row.get("tools") or ()))
    except _BadRow as error:
        return Drop(row_id, source, str(error))
    except UserError as error:
        return Drop(row_id, source, error.what)


class _BadRow(ValueError):
    pass


def _to_message(value: Any) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise _BadRow("a message has no role")
    content = value.get("content")
    calls = tuple(value.get("tool_calls") or ())
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise _BadRow("a message's content is not text")
    return Message(value["role"], content, value.get("reasoning_content"), calls)


def _content_id(row: Mapping[str, Any]) -> str:
    """Identify a row by what it says, so that its id survives re-ordering of the file."""
    text = json.dumps(row, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def in_held_out(conversation_id: str, share: float, seed: int) -> bool:
    """Decide by hash whether a conversation is held out: the same for ever, whatever its neighbours."""
    digest = hashlib.sha256(f"{seed}:{conversation_id}".encode()).digest()
    return int.from_bytes(digest[:8]) < share * 2**64
