"""What comes out of prompts answered at a given concurrency: answers, and how long they took."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from eyas.engines.base import Prompt, Sampling
from eyas.engines.spec_decode_metrics import SpecCounters
from eyas.types import Completion


@dataclass
class Served:
    """``seconds`` is the time from the first request to the last answer; latencies are one a request.

    First tokens and the times between later outputs are empty where an engine does not say them.
    """

    answers: dict[str, Completion] = field(default_factory=dict)
    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers.values())

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class Decoder(Protocol):
    """An engine that decodes with a draft, or without."""

    def answer(self, prompts: Sequence[Prompt], concurrency: int, sampling: Sampling) -> Served:
        """Answer every prompt, ``concurrency`` of them in flight. Raises: EyasError when one fails."""
        ...

    def counters(self) -> SpecCounters: ...

    def close(self) -> None: ...


@runtime_checkable
class OpenLoopDecoder(Decoder, Protocol):
    """A decoder that requests can be sent to at given times, and that says when each output came."""

    @property
    def runner(self) -> str | None:
        """Which of the engine's model runners computes; None where there is one, or it is not known."""

    @property
    def deployment(self) -> Mapping[str, str]:
        """Settings of production that change speed or rounding, by name, as they are in effect."""
        ...

    def answer_at(self, prompts: Sequence[Prompt], arrivals_s: Sequence[float], sampling: Sampling) -> Served:
        """Answer every prompt, each sent at its time after the start; times count from the arrival."""
        ...
