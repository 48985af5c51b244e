"""Acceptance by how long the context is when a round starts: drafts that fail far from the start show it."""

from collections.abc import Iterable, Sequence

from eyas.drafters.common.acceptance import Acceptance

# In tokens; the last range has no end.
_STARTS = (0, 2048, 4096, 8192, 16384, 32768)


def by_context(answers: Iterable[tuple[int, Sequence[int]]], num_draft_tokens: int) -> dict[str, Acceptance]:
    """Return the acceptance of each range of contexts that has rounds, shortest first, by its name ("2-4k").

    ``answers`` holds, for each, the tokens of its prompt and the draft tokens accepted in each round. The
    first token of an answer is the target's, and a round that accepts n draft tokens gives n + 1.
    """
    found = [Acceptance.empty(num_draft_tokens) for _ in _STARTS]
    for position, rounds in answers:
        for accepted in rounds:
            found[sum(position >= start for start in _STARTS) - 1].add_round(accepted)
            position += accepted + 1
    return {_name(i): acceptance for i, acceptance in enumerate(found) if acceptance.num_rounds}


def _name(index: int) -> str:
    start = _STARTS[index] // 1024
    return f"{start}k and above" if index + 1 == len(_STARTS) else f"{start}-{_STARTS[index + 1] // 1024}k"
