"""What an engine is: it runs the target, and gives hidden states and answers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from eyas.types import Completion, Failure, HiddenStates, TokenizedSample


@dataclass(frozen=True)
class Prompt:
    """Token ids to be answered."""

    prompt_id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled; temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class ProbeOutput:
    """States with the engine's own greedy next token and its log-probability, of one forward pass.

    ``next_token`` is None where an engine has no logits of its own. ``rank_digests[r]`` are checksums,
    one a layer, of the states that tensor-parallel rank r holds.
    """

    states: HiddenStates
    next_token: int | None
    next_logprob: float
    rank_digests: tuple[tuple[str, ...], ...] = ()


class Engine(Protocol):
    """Exactly one item out for one in, in any order; a failure is a value that names its sample."""

    # True: samples are taken as there is room, so all may be handed over in one call.
    streams: bool

    def probe_outputs(self, samples: Iterable[TokenizedSample]) -> list[ProbeOutput | Failure]: ...

    def capture(self, samples: Iterable[TokenizedSample]) -> Iterator[HiddenStates | Failure]: ...

    def generate(self, prompts: Iterable[Prompt], sampling: Sampling) -> Iterator[Completion | Failure]: ...

    def close(self) -> None: ...


class TargetSession(Protocol):
    """One sequence, decoded step by step with a key/value cache; what speculative decoding needs."""

    def extend(
        self, token_ids: Sequence[int], num_logits: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens and return logits [T, V] and aux states [T, A, D] of exactly these tokens.

        With ``num_logits`` only the last ones' logits: those of a long prompt would fill a GPU's memory.
        """
        ...

    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first ``num_tokens`` tokens."""
        ...
