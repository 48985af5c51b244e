"""Speculative decoding at a temperature: drafted tokens are accepted so that samples are the target's own.

Source: speculative sampling, arXiv 2211.17192, for a draft that proposes one token with certainty (its
argmax), as vLLM's and SGLang's default draft sampling does.
"""

from collections.abc import Sequence

import torch

from eyas.drafters.base import Proposer
from eyas.engines.base import TargetSession


@torch.inference_mode()
def sample_plain(
    session: TargetSession,
    prompt: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    eos_token_ids: Sequence[int] = (),
) -> list[int]:
    """Sample an answer from the target alone, one token a forward pass."""
    logits, _ = session.extend(prompt, num_logits=1)
    tokens: list[int] = []
    while True:
        tokens.append(_draw(probabilities(logits[-1], temperature), generator))
        if tokens[-1] in eos_token_ids or len(tokens) >= max_new_tokens:
            return tokens
        logits, _ = session.extend(tokens[-1:])


@torch.inference_mode()
def sample_speculative(
    session: TargetSession,
    draft: Proposer,
    prompt: Sequence[int],
    num_draft_tokens: int,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    eos_token_ids: Sequence[int] = (),
) -> list[int]:
    """Sample an answer with ``num_draft_tokens`` drafted tokens a target forward.

    A drafted token is accepted with the probability that the target gives it; otherwise the token is sampled
    from what remains of the target's distribution without it.
    """
    logits, aux = session.extend(prompt, num_logits=1)
    tokens = [_draw(probabilities(logits[-1], temperature), generator)]
    following = [*prompt[1:], tokens[0]]
    while tokens[-1] not in eos_token_ids and len(tokens) < max_new_tokens:
        proposal = draft.propose(aux, following, num_draft_tokens)
        logits, states = session.extend([tokens[-1], *proposal])
        new: list[int] = []
        for place in range(num_draft_tokens + 1):
            target = probabilities(logits[place], temperature)
            proposed = proposal[place] if place < num_draft_tokens else None
            token, accepted = accept_or_resample(target, proposed, generator)
            new.append(token)
            if not accepted or token in eos_token_ids or len(tokens) + len(new) == max_new_tokens:
                break
        tokens += new
        session.truncate(len(prompt) + len(tokens) - 1)
        aux, following = states[: len(new)], new
    return tokens


def accept_or_resample(
    target: torch.Tensor, proposed: int | None, generator: torch.Generator
) -> tuple[int, bool]:
    """Return a sample of ``target`` [V], and whether it is the ``proposed`` token, accepted.

    With None nothing was proposed: the token is sampled as it is.
    """
    if proposed is None:
        return _draw(target, generator), False
    if float(torch.rand((), generator=generator)) < float(target[proposed]):
        return proposed, True
    rest = target.clone()
    rest[proposed] = 0
    return _draw(rest, generator), False


def probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the distribution [V] on the CPU, in float64 so that rare tokens keep their share."""
    return torch.softmax(logits.double().cpu() / temperature, -1)


def _draw(weights: torch.Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(weights, 1, generator=generator))
