"""What differs between target architectures, as data."""

from dataclasses import dataclass

from eyas.errors import UserError, did_you_mean
from eyas.types import NormKind


@dataclass(frozen=True)
class Family:
    """Where an architecture keeps the teacher's three tensors and its layers, and how its norm works."""

    norm_kind: NormKind = "rms"
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{}."
    norm_eps_key: str = "rms_norm_eps"
    softcap_key: str | None = None
    # Name of the configuration value that the logits are multiplied by, or None.
    logit_scale_key: str | None = None


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(),
    "Qwen3ForCausalLM": Family(),
}


def family_of(architecture: str) -> Family:
    """Return the family of a config.json architecture name.

    Raises: UserError for an unknown one; a guess would train on a wrong teacher without an error.
    """
    if architecture not in FAMILIES:
        raise UserError(
            f"target architecture {architecture!r} is not supported{did_you_mean(architecture, FAMILIES)}",
            hint=f"supported: {', '.join(FAMILIES)}; a new one is a line in eyas/targets/families.py",
        )
    return FAMILIES[architecture]
