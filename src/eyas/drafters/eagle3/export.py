"""An EAGLE-3 draft as engines load it: names of tensors, and config.json of each format.

Source: vLLM's ``llama_eagle3.py`` and its EAGLE configuration; SGLang's ``llama_eagle3.py``.
Latent attention: vLLM's ``deepseek_eagle3.py``. Speculators: configurations of published checkpoints and
vLLM's ``transformers_utils/configs/speculators``.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from eyas.drafters.common.attention import SequenceKeys
from eyas.drafters.common.sglang_layers import eagle3_ids
from eyas.drafters.common.window import window_keys
from eyas.drafters.eagle3.config import DraftConfig
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.errors import ContractError, UserError
from eyas.layer_ids import ReadLayers
from eyas.types import TargetSpec, VocabMap

_UPPER_INPUT_NORM = re.compile(r"layers\.[1-9]\d*\.input_layernorm\.weight")
_VERSION = "0.9.0"  # of the format that is written
_DRAFT_TOKENS = 3  # what a server starts with unless told otherwise
# Keys of the native configuration that describe the layer; the rest is written under other names.
_LAYER_KEYS = (
    "model_type", "hidden_act", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "max_position_embeddings", "rope_parameters",
    "layer_types", "sliding_window", "attention_bias", "mlp_bias", "vocab_size", "tie_word_embeddings",
    "torch_dtype",
    # vLLM hands on what stands here, and asks for it when there are not three aux layers.
    "num_aux_hidden_states",
)  # fmt: skip


def tensors(draft: Eagle3Draft) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {name: p.detach() for name, p in draft.trainable().items()}
    for name in [n for n in found if _UPPER_INPUT_NORM.fullmatch(n)]:
        # SGLang calls it so in every layer, vLLM only in the first.
        found[name.replace("input_layernorm", "hidden_norm")] = found[name].clone()
    return found


@torch.no_grad()
def logits(draft: Eagle3Draft, aux: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of consecutive rows at their first step: every tensor and the positions matter."""
    device, keys = draft.embed_tokens.weight.device, SequenceKeys(draft.config.sliding_window)
    hidden, positions = draft.fuse(aux.to(device, torch.float32)), torch.arange(len(tokens), device=device)
    return draft.logits(draft.carry(draft(tokens.to(device), hidden, positions, keys)))


def check_config(config: Mapping[str, Any]) -> None:
    nested = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    if nested is None:
        return
    target, ids = config["eyas"]["target"], tuple(config["eagle_aux_hidden_state_layer_ids"])
    if eagle3_ids(ReadLayers(ids, target["architecture"], target["num_layers"])) != tuple(nested):
        raise ContractError("the two lists of aux layer ids in config.json disagree")


def native_config(config: DraftConfig, spec: TargetSpec, vocab: VocabMap) -> dict[str, Any]:
    ids = list(spec.aux_layer_ids)
    rope = dict(config.rope_parameters)
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    return {
        **_layer_kind(config),
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        # Newer engines read rope_parameters, older ones the two keys it replaced.
        "rope_parameters": rope,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
        # Without these keys engines see every token.
        **({} if config.sliding_window is None else window_keys(config.sliding_window, config.num_layers)),
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": config.target_vocab_size,
        "draft_vocab_size": len(vocab),
        "tie_word_embeddings": False,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "torch_dtype": spec.dtype,
        "bos_token_id": None,
        "eos_token_id": list(spec.eos_token_ids),
        "target_hidden_size": spec.hidden_size,
        "num_aux_hidden_states": len(ids),
        # vLLM reads the top level in its (our) convention, SGLang the nested list in its own.
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(eagle3_ids(spec.read_layers)),
        },
    }


def _layer_kind(config: DraftConfig) -> dict[str, Any]:
    """Return the keys by which engines know the layer's class and its attention."""
    if config.latent_attention is None:
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "head_dim": config.head_dim,
        }
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        # Not deepseek_v3: vLLM 0.32 takes any draft of that type for the target's own MTP layer.
        "model_type": "deepseek_v2",
        **config.latent_attention,
    }


def check_speculators(config: DraftConfig) -> None:
    """Raises: UserError for latent attention: in this format vLLM reads Llama and Qwen3 layers only."""
    if config.latent_attention is not None:
        raise UserError(
            "a draft with latent attention has no speculators form that vLLM loads",
            hint="set export.format=native",
        )


def speculators_config(native: dict[str, Any]) -> dict[str, Any]:
    """Return the speculators form of a native configuration."""
    spec = native["eyas"]["target"]
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": _DRAFT_TOKENS,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": spec["model"], "architectures": [spec["architecture"]]},
        },
        "transformer_layer_config": {key: native[key] for key in _LAYER_KEYS if key in native},
        "draft_vocab_size": native["draft_vocab_size"],
        "target_hidden_size": native["target_hidden_size"],
        "eagle_aux_hidden_state_layer_ids": native["eagle_aux_hidden_state_layer_ids"],
        # In this format a missing value means true.
        "norm_before_residual": native["norm_before_residual"],
        "norm_before_fc": native["norm_before_fc"],
        "fc_norm": native["fc_norm"],
        "norm_output": native["norm_output"],
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": native["torch_dtype"],
        "eyas": native["eyas"],
    }
