"""A draft's sliding window in its config.json: the types of its layers say whether it counts."""

from collections.abc import Mapping
from typing import Any

from eyas.errors import UserError

SLIDING, FULL = "sliding_attention", "full_attention"


def window_keys(window: int | None, num_layers: int) -> dict[str, Any]:
    """Return the keys by which engines know that every layer has this window, or that none has one."""
    return {"layer_types": [FULL if window is None else SLIDING] * num_layers, "sliding_window": window}


def window_of(inside: Mapping[str, Any]) -> int | None:
    """Return the window of all layers in tokens; as in vLLM, None unless their type is sliding attention.

    Raises: UserError when only some layers have one.
    """
    types = set((inside.get("layer_types") or [FULL])[: inside.get("num_hidden_layers") or 1])
    if SLIDING not in types:
        return None
    if len(types) > 1:
        raise UserError(
            "some layers of the draft have a window and others have none, which eyas does not compute",
            hint="train one from the target instead: leave draft.init_from out",
        )
    return int(inside["sliding_window"])
