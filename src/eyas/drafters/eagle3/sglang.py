"""How SGLang is told to serve an EAGLE-3 draft, and which of them it would not compute as trained."""

from collections.abc import Mapping
from typing import Any


def arguments(folder: str, num_draft_tokens: int, config: Mapping[str, Any]) -> list[str]:
    """Return the words of its command line for the draft in ``folder``, whose config.json is ``config``."""
    return [
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", folder),
        # A chain: one token a step, and the token that verification starts from.
        *("--speculative-num-steps", str(num_draft_tokens), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(num_draft_tokens + 1)),
    ]


def trouble(config: Any) -> str | None:
    """Say why SGLang would not compute the draft of this ``DraftConfig`` as it was trained, or None."""
    if config.norm_before_residual:
        return "SGLang adds to the hidden state, this draft to the normed one (norm_before_residual)"
    if config.norm_before_fc:
        return "SGLang has no norm of all aux layers as one (norm_before_fc)"
    if config.has_own_embedding:
        return "SGLang takes the target's embedding, this draft has its own"
    if config.latent_attention is not None and config.num_layers > 1:
        return "SGLang takes one layer of latent attention"
    return None
