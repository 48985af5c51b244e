"""Sums that describe training, and acceptance lengths replayed from per-row agreement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.drafters.eagle3.unroll import UnrollResult


@dataclass
class StepSums:
    """Sums only; ratios are taken last. Lists hold one entry for each unroll step."""

    loss: float
    num_supervised: int
    step_loss: list[float]
    agreed: list[int]  # rows whose draft matched the target at this and all earlier steps
    judged: list[int]  # rows that this step supervises

    @classmethod
    def empty(cls, num_steps: int) -> StepSums:
        return cls(0.0, 0, [0.0] * num_steps, [0] * num_steps, [0] * num_steps)

    @classmethod
    def of(cls, result: UnrollResult) -> StepSums:
        return cls.unpack(cls.pack(result).tolist())

    @staticmethod
    def pack(result: UnrollResult) -> torch.Tensor:
        """Put the sums into one fp64 vector [2 + 3 K] on the device, to be added up and read later."""
        steps = torch.arange(len(result.step_loss), device=result.accepted.device)[:, None]
        agreed = (result.accepted[None] > steps).sum(1)
        judged = (result.depth[None] > steps).sum(1)
        num_supervised = judged.new_full((1,), result.num_supervised)
        parts = (result.loss.detach()[None], result.step_loss, agreed, judged, num_supervised)
        return torch.cat([part.double() for part in parts])

    @classmethod
    def unpack(cls, values: Sequence[float]) -> StepSums:
        """Return the sums that ``pack`` put into a vector, or a sum of such vectors."""
        num_steps = len(values) // 3
        step_loss, agreed, judged = (values[1 + i * num_steps : 1 + (i + 1) * num_steps] for i in range(3))
        return cls(
            values[0], int(values[-1]), list(step_loss), [int(n) for n in agreed], [int(n) for n in judged]
        )

    def values(self) -> list[float]:
        """Return what ``unpack`` takes."""
        return [self.loss, *self.step_loss, *self.agreed, *self.judged, self.num_supervised]

    def __add__(self, other: StepSums) -> StepSums:
        return StepSums(
            self.loss + other.loss,
            self.num_supervised + other.num_supervised,
            [a + b for a, b in zip(self.step_loss, other.step_loss, strict=True)],
            [a + b for a, b in zip(self.agreed, other.agreed, strict=True)],
            [a + b for a, b in zip(self.judged, other.judged, strict=True)],
        )

    def ratios(self) -> dict[str, float | list[float]]:
        """Return loss per supervised row and prefix-joint agreement by step."""
        return {
            "loss": self.loss / max(1, self.num_supervised),
            "agreement": [a / max(1, j) for a, j in zip(self.agreed, self.judged, strict=True)],
        }


@dataclass
class Acceptance:
    """Rounds of speculative decoding and the draft tokens accepted in them."""

    num_rounds: int = 0
    accepted_at: tuple[int, ...] = ()  # rounds that accepted draft token k+1

    @classmethod
    def empty(cls, num_draft_tokens: int) -> Acceptance:
        return cls(0, (0,) * num_draft_tokens)

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


def replay(
    accepted: Sequence[int],
    depth: Sequence[int],
    num_draft_tokens: int,
    max_new_tokens: int | None = None,
) -> Acceptance:
    """Walk through one answer as serving would, and count.

    ``accepted[j]`` and ``depth[j]`` are those of the row that reads the answer's token j. A round
    accepts n tokens and gets one more from the target, so the next round reads token j + n + 1.
    On text that the target wrote greedily this is what decoding does, not an estimate of it.
    """
    result = Acceptance.empty(num_draft_tokens)
    limit = len(accepted) + 1 if max_new_tokens is None else max_new_tokens
    j = 0
    while j < len(accepted) and j < limit - 1:
        n = min(accepted[j], depth[j], num_draft_tokens, limit - 1 - j)
        result.add_round(n)
        j += n + 1
    return result


def replay_answers(
    rows: torch.Tensor,
    accepted: torch.Tensor,
    depth: torch.Tensor,
    num_draft_tokens: int,
    max_new_tokens: int | None = None,
) -> list[Acceptance]:
    """Replay every answer of a batch: each unbroken run of ``rows`` [R_0] is one answer."""
    if not len(rows):
        return []
    breaks = (((rows[1:] - rows[:-1]) != 1).nonzero().flatten() + 1).cpu()
    runs = zip(
        torch.tensor_split(accepted.cpu(), breaks), torch.tensor_split(depth.cpu(), breaks), strict=True
    )
    return [replay(a.tolist(), d.tolist(), num_draft_tokens, max_new_tokens) for a, d in runs]
