"""How a chat template takes tools and tool calls, learnt from the template that the row will use."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from eyas.data.render_error import RenderError
from eyas.types import Conversation

PROBE = "eyasprobe{}x"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclasses.dataclass(frozen=True)
class _Takes:
    """Whether calls show their arguments when those are JSON text, and when they are a mapping."""

    string: bool
    mapping: bool


class ToolForms:
    """Gives tools and calls to a template in the form that it renders.

    A template may be another one, or take another branch, when the request holds tools; both are probed.
    """

    def __init__(self, render: Callable[[Any, Any, bool], str]) -> None:
        """``render`` takes messages, tools, and whether a generation prompt is added."""
        self._render = render

    def for_template(
        self, conversation: Conversation, num_messages: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the first messages as the template reads them, arguments decoded where it takes no text.

        Raises: RenderError for arguments that should be decoded and are not JSON.
        """
        values = [message.for_template() for message in conversation.messages[:num_messages]]
        for value in values:
            if "tool_calls" in value:
                takes = self._with_tools if conversation.tools else self._without_tools
                value["tool_calls"] = [_in_form(call, takes) for call in value["tool_calls"]]
        return values

    def check(self, conversation: Conversation) -> None:
        """Refuse a conversation whose tools or calls the template would leave out without a word.

        Their names are replaced by marks, and every mark must show in one rendering.
        """
        num_marks = 0

        def marked(function: Mapping[str, Any]) -> dict[str, Any]:
            nonlocal num_marks
            num_marks += 1
            return {**function, "name": PROBE.format(num_marks)}

        if not conversation.tools and not any(m.tool_calls for m in conversation.messages):
            return
        tools = [
            {**t, "function": marked(t["function"])} if isinstance(t.get("function"), Mapping) else marked(t)
            for t in conversation.tools
        ]
        messages = tuple(
            dataclasses.replace(
                m, tool_calls=tuple({**c, "function": marked(c["function"])} for c in m.tool_calls)
            )
            for m in conversation.messages
        )
        values = self.for_template(dataclasses.replace(conversation, messages=messages))
        text = self._render(values, tools, False)
        if any(PROBE.format(number) not in text for number in range(1, num_marks + 1)):
            raise RenderError("template_lacks_tools")

    @cached_property
    def _with_tools(self) -> _Takes:
        return self._probed([_PROBE_TOOL])

    @cached_property
    def _without_tools(self) -> _Takes:
        return self._probed([])

    def _probed(self, tools: list[Any]) -> _Takes:
        def shows(arguments: Any) -> bool:
            call = {
                "type": "function",
                "id": "call00000",
                "function": {"name": "probe", "arguments": arguments},
            }
            messages = [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
            try:
                text = self._render(messages, tools, False)
            except RenderError:
                return False
            # JSON text that goes through the template's own JSON filter comes out with escaped quotes.
            return "eyas" in text and '\\"eyas' not in text

        return _Takes(shows('{"eyas": 1}'), shows({"eyas": 1}))


def _in_form(call: Mapping[str, Any], takes: _Takes) -> dict[str, Any]:
    """Return a call with its arguments as the template takes them; as they came when it takes both.

    Where the probe shows neither, text is decoded, as vLLM does for every template.
    """
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str) and not takes.string:
        try:
            arguments = json.loads(arguments)
        except ValueError:
            if takes.mapping:
                raise RenderError("tool_arguments_not_json") from None
    elif isinstance(arguments, Mapping) and takes.string and not takes.mapping:
        arguments = json.dumps(arguments, ensure_ascii=False)
    else:
        return dict(call)
    return {**call, "function": {**call["function"], "arguments": arguments}}
