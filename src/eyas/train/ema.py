"""A running average of the weights: validated, kept and exported, while training goes on beside it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


class WeightEMA:
    """Averages weights, given by name, over about 1 / (1 - ``decay``) steps, fewer at first."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], decay: float) -> None:
        self.decay = decay
        self.parameters = parameters
        self.averages = {name: p.detach().clone() for name, p in self.parameters.items()}
        # The weights that training goes on from, while the averages stand in their place.
        self.masters: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after ``step`` (counted from 0)."""
        # Young averages forget faster, or they would hold on to the start.
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.averages.values()), list(self.parameters.values()), share)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again from the weights as they are."""
        for name, average in self.averages.items():
            average.copy_(self.parameters[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages into the weights while the context is open; ``masters`` are what they replace."""
        self.masters = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._put(self.averages)
        try:
            yield
        finally:
            self._put(self.masters)
            self.masters = {}

    @torch.no_grad()
    def _put(self, weights: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])
