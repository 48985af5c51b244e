"""The layer-id convention: id L is the residual stream after L decoder layers.

Id 0 is the embedding output and id ``num_layers`` the last layer before the final norm. vLLM counts
the same way, and so does the index of transformers' ``hidden_states`` (except that its last entry is
taken after the final norm). Every other convention is converted here, by name, at the boundary.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.errors import UserError, did_you_mean


@dataclass(frozen=True)
class ReadLayers:
    """The layers ``ids`` that a draft reads of a target: what engines' rules for layer ids depend on.

    ``architecture`` is the target's class as in its config.json.
    """

    ids: tuple[int, ...]
    architecture: str
    num_layers: int


CONVENTIONS = ("eyas", "output-of")  # that people may name on the command line


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Return an early, a middle and a late layer: ``2, n//2, n-3`` (the EAGLE-3 default).

    Targets of fewer than eight layers have no such three distinct layers; they get the ids nearest
    to the first, second and last third instead.
    """
    if num_layers >= 8:
        return (2, num_layers // 2, num_layers - 3)
    return tuple(sorted({max(1, num_layers // 3), max(1, (2 * num_layers) // 3), max(1, num_layers - 1)}))


def check_aux_layer_ids(ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return ``ids`` as a tuple after checking that they are ascending, distinct and within the depth.

    Raises: UserError. vLLM broadcasts an id out of range in silence, so nobody else will say it.
    """
    out_of_range = [i for i in ids if not 0 <= i <= num_layers]
    if out_of_range:
        raise UserError(
            f"aux layer id {out_of_range[0]} is out of range: the target has {num_layers} layers",
            hint=f"set target.aux_layer_ids to ids from 0 to {num_layers} "
            f"(default {list(default_aux_layer_ids(num_layers))})",
        )
    if not ids:
        raise UserError("target.aux_layer_ids is empty", hint="leave it out to use the default")
    if list(ids) != sorted(set(ids)):
        raise UserError(
            f"aux layer ids {list(ids)} are not ascending and distinct",
            hint=f"set target.aux_layer_ids={sorted(set(ids))}; engines return layers in ascending order",
        )
    return tuple(ids)


def from_output_of(ids: Sequence[int]) -> tuple[int, ...]:
    """Convert "output of 0-based layer i" (SpecForge, TorchSpec, older speculators) to our ids."""
    return tuple(i + 1 for i in ids)


def check_convention(convention: str) -> None:
    """Raises: UserError for a name that is not in ``CONVENTIONS``."""
    if convention not in CONVENTIONS:
        raise UserError(
            f"unknown layer id convention {convention!r}{did_you_mean(convention, CONVENTIONS)}",
            hint=f"known: {', '.join(CONVENTIONS)}",
        )


def parse_layer_ids(text: str, convention: str) -> tuple[int, ...]:
    """Read ids separated by commas or spaces, in one of ``CONVENTIONS``; return ours.

    Raises: UserError for text that holds no ids.
    """
    try:
        ids = tuple(int(word) for word in re.split(r"[,\s]+", text.strip(" ,[]")))
    except ValueError:
        raise UserError(f"cannot read the layer ids {text!r}", hint="write --layer-ids 2,16,29") from None
    return from_output_of(ids) if convention == "output-of" else ids


def to_output_of(ids: Sequence[int]) -> tuple[int, ...]:
    """Convert our ids to "output of 0-based layer i".

    Raises: UserError for layer 0, the embedding.
    """
    if 0 in ids:
        raise UserError(
            "aux layer 0, the embedding, has no id that SGLang or a block draft can name",
            hint="choose aux layer ids of 1 and above",
        )
    return tuple(i - 1 for i in ids)
