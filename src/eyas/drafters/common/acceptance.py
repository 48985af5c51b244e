"""Acceptance lengths, replayed from how far each row of an answer agrees with the target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass
class Acceptance:
    """Rounds of speculative decoding and the draft tokens accepted in them."""

    num_rounds: int = 0
    accepted_at: tuple[int, ...] = ()  # rounds that accepted draft token k+1

    @classmethod
    def empty(cls, num_draft_tokens: int) -> Acceptance:
        return cls(0, (0,) * num_draft_tokens)

    @classmethod
    def of(cls, rounds: Iterable[int], num_draft_tokens: int) -> Acceptance:
        """Count rounds, each given by its accepted draft tokens."""
        result = cls.empty(num_draft_tokens)
        for accepted in rounds:
            result.add_round(accepted)
        return result

    def add_round(self, accepted: int) -> None:
        self.num_rounds += 1
        self.accepted_at = tuple(n + (accepted > k) for k, n in enumerate(self.accepted_at))

    def __add__(self, other: Acceptance) -> Acceptance:
        merged = tuple(a + b for a, b in zip(self.accepted_at, other.accepted_at, strict=True))
        return Acceptance(self.num_rounds + other.num_rounds, merged)

    @property
    def length(self) -> float:
        """Tokens per target forward: 1 + accepted draft tokens per round. NaN without rounds."""
        return 1 + sum(self.accepted_at) / self.num_rounds if self.num_rounds else float("nan")

    @property
    def rates(self) -> list[float]:
        """Share of rounds that accepted draft token 1, 2, ..."""
        return [n / max(1, self.num_rounds) for n in self.accepted_at]


def replay_rounds(
    accepted: Sequence[int],
    depth: Sequence[int],
    num_draft_tokens: int,
    max_new_tokens: int | None = None,
) -> list[int]:
    """Walk through one answer as serving would, and return the draft tokens accepted in each round.

    ``accepted[j]`` and ``depth[j]`` are those of the row that reads the answer's token j. A round
    accepts n tokens and gets one more from the target, so the next round reads token j + n + 1.
    On text that the target wrote greedily this is what decoding does, not an estimate of it.
    """
    rounds: list[int] = []
    limit = len(accepted) + 1 if max_new_tokens is None else max_new_tokens
    j = 0
    while j < len(accepted) and j < limit - 1:
        n = min(accepted[j], depth[j], num_draft_tokens, limit - 1 - j)
        rounds.append(n)
        j += n + 1
    return rounds


def replay(
    accepted: Sequence[int],
    depth: Sequence[int],
    num_draft_tokens: int,
    max_new_tokens: int | None = None,
) -> Acceptance:
    """Count the rounds of one answer, as ``replay_rounds`` walks through it."""
    rounds = replay_rounds(accepted, depth, num_draft_tokens, max_new_tokens)
    return Acceptance.of(rounds, num_draft_tokens)


def answers_of(
    rows: torch.Tensor, accepted: torch.Tensor, depth: torch.Tensor
) -> list[tuple[list[int], list[int]]]:
    """Return ``accepted`` and ``depth`` of each answer of a batch: an unbroken run of ``rows`` [R_0]."""
    if not len(rows):
        return []
    breaks = (((rows[1:] - rows[:-1]) != 1).nonzero().flatten() + 1).cpu()
    runs = zip(
        torch.tensor_split(accepted.cpu(), breaks), torch.tensor_split(depth.cpu(), breaks), strict=True
    )
    return [(a.tolist(), d.tolist()) for a, d in runs]


def replay_answers(
    rows: torch.Tensor,
    accepted: torch.Tensor,
    depth: torch.Tensor,
    num_draft_tokens: int,
    max_new_tokens: int | None = None,
) -> list[Acceptance]:
    """Replay every answer of a batch."""
    answers = answers_of(rows, accepted, depth)
    return [replay(a, d, num_draft_tokens, max_new_tokens) for a, d in answers]
