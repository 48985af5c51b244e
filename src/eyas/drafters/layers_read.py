"""Which aux layers a draft reads, of those that are captured."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from eyas.config.schema import DraftSettings
from eyas.errors import UserError
from eyas.layer_ids import check_aux_layer_ids
from eyas.types import TargetSpec

if TYPE_CHECKING:
    from eyas.drafters.base import Drafter


def captured_by_default(drafter: "Drafter", settings: DraftSettings) -> Callable[[int], tuple[int, ...]]:
    """Return what is captured where target.aux_layer_ids says nothing, by the target's depth."""
    asked = settings.aux_layer_ids
    if asked is None:
        return drafter.default_aux_layer_ids
    return lambda num_layers: check_aux_layer_ids(asked, num_layers)


def layers_read(drafter: "Drafter", settings: DraftSettings, spec: TargetSpec) -> tuple[int, ...]:
    """Return the layers that the draft reads: as asked, else the kind's own where all of them are captured,
    else all that are.

    Raises: UserError for a layer that ``spec`` does not capture.
    """
    captured = spec.aux_layer_ids
    if settings.aux_layer_ids is None:
        own = drafter.default_aux_layer_ids(spec.num_layers)
        return own if set(own) <= set(captured) else captured
    asked = check_aux_layer_ids(settings.aux_layer_ids, spec.num_layers)
    if missing := sorted(set(asked) - set(captured)):
        every = str(sorted({*captured, *asked})).replace(" ", "")
        raise UserError(
            f"draft.aux_layer_ids={list(asked)}, and layers {missing} are not captured: "
            f"target.aux_layer_ids={list(captured)}",
            hint=f"set target.aux_layer_ids={every}, and run: eyas extract -c <run file> --fresh",
        )
    return asked
