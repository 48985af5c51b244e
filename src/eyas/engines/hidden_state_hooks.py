"""Forward hooks that keep the residual stream at chosen layers of a transformers model."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from eyas.errors import ContractError


class HiddenStateHooks:
    """Capture the stream after the given numbers of layers while the context is open.

    Id 0 is what the first layer reads; id L what layer L (1-based) returns, before the final norm.
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        self._layers = decoder_layers(model)
        self._handles: list[Any] = []
        self._seen: dict[int, torch.Tensor] = {}

    def __enter__(self) -> "HiddenStateHooks":
        for layer_id in dict.fromkeys(self.layer_ids):
            if layer_id == 0:
                handle = self._layers[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)
            else:
                handle = self._layers[layer_id - 1].register_forward_hook(self._keep_output(layer_id))
            self._handles.append(handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def stacked(self) -> torch.Tensor:
        """Return the captured states [B, T, A, D] in the order asked for."""
        missing = [i for i in self.layer_ids if i not in self._seen]
        if missing:
            raise ContractError(f"no states were captured at layer {missing[0]}")
        return torch.stack([self._seen[i] for i in self.layer_ids], dim=2)

    def aux_and_last(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return aux [B, T, A, D] and last [B, T, D], the last id asked for being the last layer."""
        states = self.stacked()
        return states[:, :, :-1], states[:, :, -1]

    def _keep_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._seen[0] = args[0] if args else kwargs["hidden_states"]

    def _keep_output(self, layer_id: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._seen[layer_id] = output[0] if isinstance(output, tuple) else output

        return keep


def text_decoder(model: nn.Module) -> nn.Module:
    """Return the module of a transformers model that owns the decoder layers and has no head.

    Wrappers of several modalities give their text model, Llama 4 one with a head still on it.
    """
    decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
    return decoder if hasattr(decoder, "layers") else decoder.model  # type: ignore[return-value]


def decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    """Return the decoder layers of a transformers language model."""
    layers: nn.ModuleList = text_decoder(model).layers  # type: ignore[assignment]
    return list(layers)
