"""The half of an objective that is the same wherever autograd makes the gradients."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager

import torch

from eyas.drafters.base import Draft, HandOver


class AutogradObjective:
    """Gradients are in the ``grad`` of the draft's parameters, from ``start`` to the next one.

    Those in ``frozen`` are not trained: their gradients are handed to nobody.
    """

    copies: Mapping[torch.Tensor, torch.Tensor] | None = None

    def __init__(
        self, draft: Draft, frozen: Collection[str], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parameters = draft.trainable()
        self._frozen, self._dtype, self._device = frozen, dtype, device
        self._hand_over: HandOver | None = None

    def autocast(self) -> AbstractContextManager[None]:
        """Multiply matrices in the compute dtype while the context is open."""
        context: AbstractContextManager[None] = torch.autocast(
            self._device.type, self._dtype, enabled=self._dtype != torch.float32
        )
        return context

    def hand_over_to(self, take: HandOver) -> None:
        self._hand_over = take

    def start(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def expect_last(self) -> None:
        """Nothing is handed over before ``finish``."""

    def finish(self) -> None:
        if self._hand_over is None:
            return
        for name, parameter in self._parameters.items():
            if name in self._frozen:
                continue
            if parameter.grad is None:  # no batch, or none with a row
                parameter.grad = torch.zeros_like(parameter)
            self._hand_over(name, parameter.grad)

    def refresh(self) -> None:
        """The weights themselves are read."""
