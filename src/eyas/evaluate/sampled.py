"""Speculative decoding at a temperature: drafted tokens are accepted so that samples are the target's own.

Source: speculative sampling, arXiv 2211.17192, for a draft that proposes one token with certainty (its
argmax), as vLLM's and SGLang's default draft sampling does.
"""

import torch

from eyas.evaluate.decode import Choose


def sampler(temperature: float, generator: torch.Generator) -> Choose:
    """Return the rule that samples at a temperature.

    A drafted token is accepted with the probability that the target gives it; otherwise the token is sampled
    from what remains of the target's distribution without it.
    """

    def choose(logits: torch.Tensor, proposed: int | None) -> tuple[int, bool]:
        return accept_or_resample(probabilities(logits, temperature), proposed, generator)

    return choose


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
