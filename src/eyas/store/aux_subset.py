"""States of the asked target with the asked aux layers, out of a store that may hold more of them."""

import dataclasses
from collections.abc import Sequence

from eyas.errors import UserError
from eyas.files import fingerprint
from eyas.store.base import StateReader
from eyas.types import HiddenStates, TargetSpec, TokenizedSample


def with_layers(states: StateReader, aux_layer_ids: Sequence[int]) -> StateReader:
    """Return ``states`` with only the given layers. Raises: UserError when one of them was not captured."""
    check_captured(states.spec, aux_layer_ids)
    return states if states.spec.aux_layer_ids == tuple(aux_layer_ids) else AuxSubset(states, aux_layer_ids)


def check_captured(spec: TargetSpec, aux_layer_ids: Sequence[int]) -> None:
    """Raises: UserError naming the layers that ``spec``'s states lack."""
    if missing := sorted(set(aux_layer_ids) - set(spec.aux_layer_ids)):
        every = sorted({*spec.aux_layer_ids, *aux_layer_ids})
        raise UserError(
            f"the draft reads aux layers {list(aux_layer_ids)}, and {missing} were not captured: the states "
            f"hold {list(spec.aux_layer_ids)}",
            hint=f"run: eyas extract -c <run file> --fresh target.aux_layer_ids={every}".replace(", ", ","),
        )


def check_states(stored: TargetSpec, asked: TargetSpec) -> None:
    """Refuse states of another target, or without a layer of ``asked``. Raises: UserError."""
    check_same_target(dataclasses.replace(stored, aux_layer_ids=asked.aux_layer_ids), asked)
    check_captured(stored, asked.aux_layer_ids)


def check_same_target(stored: TargetSpec, asked: TargetSpec) -> None:
    """Refuse states of another target, naming what differs.

    Raises: UserError.
    """
    if stored.fingerprint == asked.fingerprint:
        return
    before, now = stored.to_json(), asked.to_json()
    key = next(k for k in before if before[k] != now[k] and k not in ("model", "revision"))
    raise UserError(
        f"the states were written for another target: {key} is {before[key]} there and {now[key]} here",
        hint="extract again for this target: eyas extract --fresh",
    )


class AuxSubset:
    """A StateReader over another one's states; its spec names the layers that are left."""

    def __init__(self, states: StateReader, aux_layer_ids: Sequence[int]) -> None:
        self.states = states
        self.spec = dataclasses.replace(states.spec, aux_layer_ids=tuple(aux_layer_ids))
        self.fingerprint = fingerprint([states.fingerprint, list(aux_layer_ids)])
        self._columns = [states.spec.aux_layer_ids.index(layer) for layer in aux_layer_ids]

    @property
    def lengths(self) -> Sequence[int]:
        return self.states.lengths

    def sample(self, index: int) -> TokenizedSample:
        return self.states.sample(index)

    def read(self, index: int) -> HiddenStates:
        states = self.states.read(index)
        return HiddenStates(states.sample, states.aux[:, self._columns], states.last)
