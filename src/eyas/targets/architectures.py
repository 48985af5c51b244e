"""What differs between target architectures, as data."""

from dataclasses import dataclass, replace

from eyas.errors import UserError, did_you_mean
from eyas.types import NormKind


@dataclass(frozen=True)
class Family:
    """How an architecture ends: its final norm, its head, and what happens to the logits.

    Names are those behind the prefix of the text model (``PREFIXES`` in weights.py finds it).
    """

    name: str
    norm_kind: NormKind = "rms"
    norm_eps_key: str = "rms_norm_eps"
    final_norm: str = "norm"
    softcap_key: str | None = None
    # Configuration values that the logits are multiplied or divided by.
    logit_scale_key: str | None = None
    logit_divisor_key: str | None = None
    # The norm in front of a layer's MLP.
    mlp_norm: str = "post_attention_layernorm"


_LLAMA = Family("Llama")
_QWEN_HYBRID = Family("Qwen3-Next, Qwen3.5", norm_kind="rms_one_plus")
_GEMMA = Family("Gemma", norm_kind="rms_one_plus")
_GEMMA_2 = Family(
    "Gemma 2, Gemma 3",
    norm_kind="rms_one_plus",
    softcap_key="final_logit_softcapping",
    mlp_norm="pre_feedforward_layernorm",
)
_GRANITE = Family("Granite", logit_divisor_key="logits_scaling")
_DEEPSEEK = Family("DeepSeek-V2, DeepSeek-V3, Kimi-K2")
_KIMI = Family("Kimi-K2.5")

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "Llama4ForCausalLM": replace(_LLAMA, name="Llama 4"),
    "Llama4ForConditionalGeneration": replace(_LLAMA, name="Llama 4"),
    "MistralForCausalLM": replace(_LLAMA, name="Mistral"),
    "Mistral3ForConditionalGeneration": replace(_LLAMA, name="Mistral"),
    "Ministral3ForCausalLM": replace(_LLAMA, name="Mistral"),
    "MixtralForCausalLM": replace(_LLAMA, name="Mixtral"),
    "Qwen2ForCausalLM": replace(_LLAMA, name="Qwen2, Qwen2.5"),
    "Qwen2MoeForCausalLM": replace(_LLAMA, name="Qwen2, Qwen2.5"),
    "Qwen3ForCausalLM": replace(_LLAMA, name="Qwen3"),
    "Qwen3MoeForCausalLM": replace(_LLAMA, name="Qwen3"),
    "Qwen3NextForCausalLM": _QWEN_HYBRID,
    "Qwen3_5ForCausalLM": _QWEN_HYBRID,
    "Qwen3_5MoeForCausalLM": _QWEN_HYBRID,
    "Qwen3_5ForConditionalGeneration": _QWEN_HYBRID,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_HYBRID,
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": _GEMMA_2,
    "Gemma3ForConditionalGeneration": _GEMMA_2,
    "PhiForCausalLM": Family(
        "Phi", norm_kind="layer", norm_eps_key="layer_norm_eps", final_norm="final_layernorm"
    ),
    "Phi3ForCausalLM": replace(_LLAMA, name="Phi-3, Phi-4"),
    "PhiMoEForCausalLM": Family("Phi-3.5-MoE", norm_kind="layer"),
    "PhimoeForCausalLM": Family("Phi-3.5-MoE", norm_kind="layer"),
    "GptOssForCausalLM": replace(_LLAMA, name="GPT-OSS"),
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeForCausalLM": _GRANITE,
    "GlmForCausalLM": replace(_LLAMA, name="GLM"),
    "Glm4ForCausalLM": replace(_LLAMA, name="GLM"),
    "Glm4MoeForCausalLM": replace(_LLAMA, name="GLM"),
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "KimiK25ForConditionalGeneration": _KIMI,
    "Kimi_K25ForConditionalGeneration": _KIMI,
}


def family_of(architecture: str) -> Family:
    """Return the family of a config.json architecture name.

    Raises: UserError for an unknown one; a guess would train on a wrong teacher without an error.
    """
    if architecture not in FAMILIES:
        raise UserError(
            f"target architecture {architecture!r} is not supported{did_you_mean(architecture, FAMILIES)}",
            hint="docs/reference/targets.md lists those that are, and what a further one needs: "
            "a line in eyas/targets/architectures.py and a tiny model of its class in "
            "tests/support/families.py",
        )
    return FAMILIES[architecture]
