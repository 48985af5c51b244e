"""Examples for the report: decoded answers in pieces, each the draft's or the target's."""

from collections.abc import Sequence
from typing import Any

from eyas.evaluate.decode import Decoded

_NUM = 4
_PROMPT_CHARACTERS = 400


def examples_of(tokenizer: Any, decoded: Sequence[tuple[list[int], Decoded]]) -> list[dict[str, Any]]:
    """Return a few answers as pieces: ``accepted`` and ``rejected`` draft tokens, ``target`` tokens.

    ``decoded`` holds a prompt's token ids and what was decoded. Rejected pieces are no part of the answer.
    """
    return [
        {
            "prompt": _tail(tokenizer.decode(ids, skip_special_tokens=True)),
            "pieces": pieces(tokenizer, one),
        }
        for ids, one in decoded[:_NUM]
    ]


def pieces(tokenizer: Any, decoded: Decoded) -> list[tuple[str, str]]:
    """Return (kind, text); the pieces that are not rejected join to the answer's text."""
    found: list[tuple[str, str]] = []
    written = ""

    def add(kind: str, num_tokens: int) -> str:
        # Decoded from the start each time: a character may need several tokens.
        text = str(tokenizer.decode(decoded.token_ids[:num_tokens], skip_special_tokens=True))
        # A character that is not whole yet shows as a replacement; it waits for its other tokens.
        text = text.rstrip("\ufffd")
        if len(text) > len(written):
            found.append((kind, text[len(written) :]))
            return text
        return written

    place = 1
    written = add("target", place)
    for proposal, num_accepted in decoded.rounds:
        for _ in range(num_accepted):
            place += 1
            written = add("accepted", place)
        if num_accepted < len(proposal) and place < len(decoded.token_ids):
            refused = proposal[num_accepted]
            if refused != decoded.token_ids[place]:
                found.append(("rejected", str(tokenizer.decode([refused]))))
        if place < len(decoded.token_ids):
            place += 1
            written = add("target", place)
    return found


def _tail(text: str) -> str:
    return text if len(text) <= _PROMPT_CHARACTERS else "…" + text[-_PROMPT_CHARACTERS:]
