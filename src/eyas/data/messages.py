"""One message of published data becomes a Message, whatever its spelling."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from eyas.data.fields import BadRow, Fields
from eyas.data.roles import role_of
from eyas.data.training_flags import says_trained
from eyas.types import ROLES, Message


def read_message(
    value: Any, role_map: Mapping[str, str], ignored: Collection[str], unused: list[str]
) -> Message:
    """Read one message; the keys of it that were not used are added to ``unused``.

    Raises: BadRow with the reason for which its row is dropped.
    """
    if not isinstance(value, Mapping):
        raise BadRow("bad_shape")
    if len(value) == 2 and not role_map and not ignored:
        role, text = value.get("role"), value.get("content")
        if role in ROLES and isinstance(text, str):
            return Message(role, text)  # most messages: nothing in them needs interpretation
    fields = Fields(value, ignored)
    name, content = fields.take("role", "from"), fields.take("content", "value")
    calls, older_call = fields.take("tool_calls"), fields.take("function_call")
    reasoning = fields.take_filled("reasoning_content", "reasoning", "thinking")
    spoken_by, call_id = fields.take("name"), fields.take("tool_call_id")
    finish_reason = fields.take("finish_reason")
    try:
        flag = says_trained(fields, role_map)
    finally:
        unused += fields.unread()
    if not isinstance(name, str):
        raise BadRow("bad_shape")
    role = role_of(name, role_map)
    if role not in ROLES:
        raise BadRow(f"unknown_role:{name}")
    if flag and role != "assistant":
        raise BadRow(f"trained_role:{role}")
    tool_calls = _tool_calls(calls, older_call, name, content)
    if name == "function_call":
        content = ""
    if reasoning is not None and not isinstance(reasoning, str):
        raise BadRow("bad_shape")
    if content is None and (tool_calls or reasoning):
        content = ""
    text, thoughts = read_content(content, role_map, ignored, unused)
    if reasoning and thoughts:
        unused.append("content.thinking")
    return Message(
        role,
        text,
        reasoning or thoughts or None,
        tool_calls,
        name=None if spoken_by is None else str(spoken_by),
        tool_call_id=None if call_id is None else str(call_id),
        cut=role == "assistant" and finish_reason == "length",
        trained=flag is not False or role != "assistant",
    )


def read_content(
    content: Any, role_map: Mapping[str, str], ignored: Collection[str], unused: list[str]
) -> tuple[str, str]:
    """Return a content's text and its thoughts; the text parts of a list are joined.

    Raises: BadRow for a part that is neither, or that has a flag of its own about training.
    """
    if isinstance(content, str):
        return content, ""
    if content is None:
        raise BadRow("missing_content")
    if not isinstance(content, list):
        raise BadRow("bad_shape")
    texts, thoughts = [], []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise BadRow("bad_shape")
        fields = Fields(part, ignored)
        kind = str(fields.take("type") or "text")
        if kind == "thinking":
            thoughts.append(str(fields.take("thinking") or ""))
        elif kind in ("text", "input_text", "output_text"):
            text = fields.take("text")
            if not isinstance(text, str):
                raise BadRow("missing_content")
            texts.append(text)
        else:
            raise BadRow(f"unsupported_content:{kind}")
        if says_trained(fields, role_map) is not None:
            raise BadRow("partly_trained_turn:content")
        unused += [f"content.{key}" for key in fields.unread()]
    return "".join(texts), "".join(thoughts)


def read_objects(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Read a list of objects, one object, or either as JSON text."""
    value = decoded(value)
    if value is None or value == "":
        return ()
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or not all(isinstance(v, Mapping) for v in value):
        raise BadRow("bad_tools")
    return tuple(value)


def decoded(value: Any) -> Any:
    """Decode a list or object that was stored as JSON text; leave everything else."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _tool_calls(calls: Any, older_call: Any, role_name: str, content: Any) -> tuple[Mapping[str, Any], ...]:
    """Read calls in the OpenAI shape, its older ``function_call``, or ShareGPT's turn of that role."""
    found = list(read_objects(calls))
    if older_call:
        found += read_objects(older_call)
    if role_name == "function_call":
        found += read_objects(content)
        if not found:
            raise BadRow("bad_tool_call")
    return tuple(_tool_call(call) for call in found)


def _tool_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if "function" not in call:
        known = {k: call[k] for k in ("name", "arguments") if k in call}
        call = {"type": "function", **{k: v for k, v in call.items() if k not in known}, "function": known}
    function = call["function"]
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRow("bad_tool_call")
    return call
