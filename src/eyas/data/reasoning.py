"""An answer's reasoning and content, split as a server's reasoning parser splits them."""

import re

# A generation prompt may open the reasoning itself; what is generated then starts inside of it.
OPENED_THINKING = re.compile(r"<think>\s*\Z")
_OPEN, _CLOSE = "<think>", "</think>"


def split_reasoning(text: str, begun: bool) -> tuple[str | None, str]:
    """Return the reasoning, None where an answer has none, and the content.

    ``begun``: the prompt has opened the reasoning. What was cut inside of the reasoning has no content.
    Source: vLLM's ``BaseThinkingReasoningParser``, which SGLang's parsers agree with.
    """
    if not begun and not text.lstrip().startswith(_OPEN):
        return None, text
    before, opened, after = text.partition(_OPEN)
    inside = after if opened and not before.strip() else text
    reasoning, _, content = inside.partition(_CLOSE)
    return reasoning, content
