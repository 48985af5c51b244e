"""A tiny random model of each architecture class, written as its released checkpoints are."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_rope_utils import RopeParameters

from tiny import make_tokenizer

_MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_SHARED = {**_MOE, "shared_expert_intermediate_size": 32}
_YARN: RopeParameters = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "rope_parameters": _YARN,
}
_DEEPSEEK_3 = {**_MOE, **_LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_LLAMA_4 = {
    **_MOE,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 96,
    "attention_chunk_size": 512,
}
_GEMMA = {"query_pre_attn_scalar": 32, "sliding_window": 64}
_GRANITE = {"logits_scaling": 3.0, "embedding_multiplier": 4.0, "residual_multiplier": 0.5}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True)
class Tiny:
    """A model type of transformers with what differs from the common shape.

    ``vision`` makes it a wrapper with the text model inside. ``released_as`` is the architecture name of
    released checkpoints where transformers writes another. ``engine`` says how vLLM's CPU build ran it.
    """

    model_type: str
    architecture: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    text_type: str | None = None
    vision: Mapping[str, Any] | None = None
    released_as: str | None = None
    # What the specification must say, beyond the common.
    norm_kind: str = "rms"
    softcap: float | None = None
    scale: float = 1.0
    tied: bool = False


TINY: dict[str, Tiny] = {
    "llama": Tiny("llama", "LlamaForCausalLM"),
    "llama-tied": Tiny("llama", "LlamaForCausalLM", {"tie_word_embeddings": True}, tied=True),
    "llama4": Tiny(
        "llama4_text",
        "Llama4ForCausalLM",
        _LLAMA_4,
    ),
    "llama4-wrapped": Tiny(
        "llama4",
        "Llama4ForConditionalGeneration",
        _LLAMA_4,
        vision={
            **_VISION,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    ),
    "mistral": Tiny("mistral", "MistralForCausalLM"),
    "mistral3-wrapped": Tiny(
        "mistral3", "Mistral3ForConditionalGeneration", text_type="mistral", vision=_VISION
    ),
    "ministral3": Tiny("ministral3", "Ministral3ForCausalLM"),
    "mixtral": Tiny("mixtral", "MixtralForCausalLM", _MOE),
    "qwen2": Tiny("qwen2", "Qwen2ForCausalLM"),
    "qwen2-tied": Tiny("qwen2", "Qwen2ForCausalLM", {"tie_word_embeddings": True}, tied=True),
    "qwen2-moe": Tiny("qwen2_moe", "Qwen2MoeForCausalLM", _SHARED),
    "qwen3": Tiny("qwen3", "Qwen3ForCausalLM"),
    "qwen3-moe": Tiny("qwen3_moe", "Qwen3MoeForCausalLM", _MOE),
    "qwen3-next": Tiny(
        "qwen3_next", "Qwen3NextForCausalLM", {**_SHARED, **_LINEAR}, norm_kind="rms_one_plus"
    ),
    "qwen3.5": Tiny("qwen3_5_text", "Qwen3_5ForCausalLM", _LINEAR, norm_kind="rms_one_plus"),
    "qwen3.5-moe": Tiny(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", {**_SHARED, **_LINEAR}, norm_kind="rms_one_plus"
    ),
    "qwen3.5-wrapped": Tiny(
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        _LINEAR,
        vision={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 128,
        },
        norm_kind="rms_one_plus",
    ),
    "gemma": Tiny("gemma", "GemmaForCausalLM", norm_kind="rms_one_plus", tied=True),
    "gemma2": Tiny(
        "gemma2",
        "Gemma2ForCausalLM",
        {**_GEMMA, "final_logit_softcapping": 3.0},
        norm_kind="rms_one_plus",
        softcap=3.0,
        tied=True,
    ),
    "gemma3": Tiny("gemma3_text", "Gemma3ForCausalLM", _GEMMA, norm_kind="rms_one_plus", tied=True),
    "gemma3-wrapped": Tiny(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        {**_GEMMA, "tie_word_embeddings": True},
        vision=_VISION,
        norm_kind="rms_one_plus",
        tied=True,
    ),
    "phi": Tiny("phi", "PhiForCausalLM", norm_kind="layer"),
    "phi3": Tiny("phi3", "Phi3ForCausalLM"),
    "phimoe": Tiny(
        "phimoe",
        "PhimoeForCausalLM",
        {**_MOE, "lm_head_bias": True},
        released_as="PhiMoEForCausalLM",
        norm_kind="layer",
    ),
    "gpt-oss": Tiny("gpt_oss", "GptOssForCausalLM", _MOE),
    "granite": Tiny("granite", "GraniteForCausalLM", _GRANITE, scale=1 / 3),
    "granite-moe": Tiny("granitemoe", "GraniteMoeForCausalLM", {**_MOE, **_GRANITE}, scale=1 / 3),
    "glm": Tiny("glm", "GlmForCausalLM"),
    "glm4": Tiny("glm4", "Glm4ForCausalLM"),
    "glm4-moe": Tiny(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {**_MOE, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    ),
    "deepseek-v2": Tiny("deepseek_v2", "DeepseekV2ForCausalLM", {**_MOE, **_LATENT, "topk_method": "greedy"}),
    "deepseek-v3": Tiny("deepseek_v3", "DeepseekV3ForCausalLM", _DEEPSEEK_3),
    "kimi-k2": Tiny("deepseek_v3", "DeepseekV3ForCausalLM", _DEEPSEEK_3, text_type="kimi_k2"),
    "kimi-k2.5": Tiny(
        "kimi_k25",
        "Kimi_K25ForConditionalGeneration",
        _DEEPSEEK_3,
        text_type="kimi_k2",
        vision=_VISION,
        released_as="KimiK25ForConditionalGeneration",
    ),
}


def make_family(folder: Path, name: str, num_layers: int = 4, **further: Any) -> Path:
    """Write the tiny model ``name`` of TINY with a tokenizer, and return its folder."""
    tiny = TINY[name]
    tokenizer = make_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,  # four heads of 32, for models that name no head_dim
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **tiny.settings,
        **further,
    }
    if tiny.vision is not None:
        text = shape | ({"model_type": tiny.text_type} if tiny.text_type else {})
        config = AutoConfig.for_model(
            tiny.model_type, text_config=text, vision_config=dict(tiny.vision), tie_word_embeddings=tiny.tied
        )
    else:
        config = AutoConfig.for_model(tiny.model_type, **shape)
    torch.manual_seed(0)
    kind = AutoModelForCausalLM if tiny.vision is None else AutoModelForImageTextToText
    model = kind.from_config(config, dtype=torch.float32)
    randomise(model, tiny.norm_kind == "rms_one_plus")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    _name_as_released(folder, tiny)
    return folder


def randomise(model: torch.nn.Module, one_plus: bool) -> None:
    """Give norms and biases values that show whether they are used, and how."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight") and parameter.ndim == 1:
                parameter.copy_((0.0 if one_plus else 1.0) + 0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))


def _name_as_released(folder: Path, tiny: Tiny) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = [tiny.released_as or tiny.architecture]
    if tiny.model_type == "kimi_k25":
        config["media_placeholder_token_id"] = 2  # vLLM reads it, and transformers' class has no such field
    if tiny.text_type:
        (config["text_config"] if tiny.vision is not None else config)["model_type"] = tiny.text_type
    path.write_text(json.dumps(config))
    if tiny.model_type == "kimi_k25":
        tensors = load_file(folder / "model.safetensors")
        for old, new in _KIMI_NAMES.items():
            tensors = {n.replace(old, new): t for n, t in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# transformers 5.19 writes some tensors of Kimi-K2.5 under other names than it reads.
_KIMI_NAMES = {
    "language_model.model.blocks.": "language_model.model.layers.",
    "model.mm_projector.": "mm_projector.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
}


def shard_weights(folder: Path, num_files: int = 2, with_index: bool = True) -> None:
    """Split the single weight file, as large models are."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = names[number::num_files]
        save_file({n: tensors[n] for n in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if with_index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def quantise_experts(folder: Path) -> Path:
    """Pack the experts of a checkpoint as Kimi-K2.5 ships them: INT4, symmetric, groups of 32."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    kept: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".mlp.experts." not in name or not name.endswith("_proj.weight"):
            kept[name] = tensor.clone()
            continue
        groups = tensor.unflatten(1, (-1, 32))
        scale = groups.abs().amax(-1, keepdim=True) / 7.5
        values = (groups / scale).round().clamp(-8, 7).to(torch.int8).flatten(1)
        base = name.removesuffix(".weight")
        kept[f"{base}.weight_packed"] = pack_to_int32(values, 4)
        kept[f"{base}.weight_scale"] = scale[..., 0].contiguous()
        kept[f"{base}.weight_shape"] = torch.tensor(tensor.shape, dtype=torch.int32)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": [
            "lm_head",
            "re:.*(vision_tower|mm_projector).*",
            "re:.*self_attn.*",
            "re:.*shared_expert.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            r"re:.*mlp\.gate$",
        ],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "dynamic": False,
                },
            }
        },
    }
    path.write_text(json.dumps(config))
    return folder
