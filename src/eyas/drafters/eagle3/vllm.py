"""How vLLM is told to serve an EAGLE-3 draft, and for which targets it can."""

from collections.abc import Collection, Mapping
from typing import Any

from eyas.errors import UserError

Version = tuple[int, int]
OLDEST: Version = (0, 22)  # EAGLE-3.1's norms; older ones ignore them in silence


def speculative_config(folder: str, num_draft_tokens: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``speculative_config`` for the draft in ``folder``, whose config.json is ``config``."""
    return {"method": "eagle3", "model": folder, "num_speculative_tokens": num_draft_tokens}


def check(version: Version, features: Collection[str], architecture: str) -> None:
    """Compare a vLLM of this version with what such a draft needs.

    ``features`` are vLLM's model interfaces (``supports_...``) that its class of the target's
    ``architecture`` has.
    Raises: UserError when it cannot serve the draft.
    """
    text = ".".join(map(str, version))
    if version < OLDEST:
        raise UserError(
            f"vLLM {text} does not serve these drafts; {'.'.join(map(str, OLDEST))} and later do",
            hint="pip install 'vllm>=0.31'",
        )
    if "supports_eagle3" not in features:
        raise UserError(
            f"vLLM {text} cannot serve an EAGLE-3 draft for {architecture}",
            hint="a later version may; SGLang too: eyas serve --print --engine sglang",
        )
