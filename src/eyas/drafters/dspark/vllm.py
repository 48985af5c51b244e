"""How vLLM is told to serve a DSpark draft, and what it needs for it."""

from typing import Any

from eyas.drafters.common.block.serving import check_block

OLDEST = (0, 26)
ON_CPU = False  # its V1 runner, which a CPU needs, has no such drafts
# vLLM asks this of a target's class before it captures aux states for a draft.
TARGET_INTERFACE = "supports_eagle3"


def speculative_config(draft: str, num_draft_tokens: int) -> dict[str, Any]:
    check_block("vLLM", draft, num_draft_tokens, first_slot=0)
    return {"method": "dspark", "model": draft, "num_speculative_tokens": num_draft_tokens}
