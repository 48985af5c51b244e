"""How vLLM is told to serve an EAGLE-3 draft, and what it needs for it."""

from typing import Any

OLDEST = (0, 22)  # EAGLE-3.1's norms; older versions ignore them in silence
ON_CPU = True
# vLLM asks this of a target's class before it captures aux states for a draft.
TARGET_INTERFACE = "supports_eagle3"


def speculative_config(draft: str, num_draft_tokens: int) -> dict[str, Any]:
    return {"method": "eagle3", "model": draft, "num_speculative_tokens": num_draft_tokens}
