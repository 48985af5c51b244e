"""How vLLM is told to serve a DFlash draft, and when it cannot."""

from typing import Any

# The first version whose DFlash draft honours its configuration's causality for each layer.
MIN_VERSION = (0, 26)


def speculative_config(draft: str, num_draft_tokens: int) -> dict[str, Any]:
    return {"method": "dflash", "model": draft, "num_speculative_tokens": num_draft_tokens}
