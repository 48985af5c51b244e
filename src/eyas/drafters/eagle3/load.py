"""Reads EAGLE-3 drafts as they are published: native names, ``midlayer.*``, and the speculators format.

Whatever this draft does not compute is refused by name; nothing is read past in silence.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eyas.drafters.common.heads_and_rope import latent_head_dim, latent_rope, whole_latent
from eyas.drafters.common.stored import StoredDraft, check_tensors, target_ids_of
from eyas.drafters.common.window import window_of
from eyas.drafters.eagle3.config import DraftConfig
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.errors import ContractError, UserError
from eyas.layer_ids import from_output_of
from eyas.types import LATENT_KEYS

# What engines take when a configuration says nothing.
_MISSING = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
_REFUSED = {
    "attention_bias": "has biases in its attention",
    "mlp_bias": "has biases in its MLP",
    "quantization_config": "is quantised",
    "parallel_drafting": "drafts all its tokens at once",
}
_UPPER_HIDDEN_NORM = re.compile(r"layers\.[1-9]\d*\.hidden_norm\.weight")


def recognises(config: Mapping[str, Any]) -> bool:
    kind = config.get("speculators_model_type")
    if kind:
        return bool(kind == "eagle3")
    return any("Eagle3" in str(n) or "EAGLE3" in str(n) for n in config.get("architectures") or ())


def check(folder: Path, config: Mapping[str, Any]) -> None:
    inside = config.get("transformer_layer_config") or {}
    for key, what in _REFUSED.items():
        if config.get(key, inside.get(key)):
            raise UserError(
                f"the draft in {folder} {what} ({key}), which eyas does not compute",
                hint="train one from the target instead: leave draft.init_from out",
            )


def read(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> StoredDraft:
    """Return the draft. What a config.json lacks is Python's own error, which ``read_draft`` explains."""
    tensors = {_own_name(name): tensor for name, tensor in tensors.items()}
    inside = config.get("transformer_layer_config") or config
    d2t = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    for name in [n for n in tensors if _UPPER_HIDDEN_NORM.fullmatch(n)]:
        # SGLang's name of what input_layernorm is to vLLM.
        norm = tensors.pop(name)
        if not torch.equal(norm, tensors.get(name.replace("hidden_norm", "input_layernorm"), norm)):
            raise ContractError(
                f"{folder}: engines would serve different drafts, for a layer has two norms ({name})"
            )
    if "fc.weight" not in tensors:
        raise ContractError(f"{folder} has unknown or missing tensors: ['fc.weight']")
    shape, aux_layer_ids = _shape(config, inside, tensors), _aux_layer_ids(config)
    if shape.num_layers > len(tensors):  # before they are made
        raise ValueError(f"{shape.num_layers} layers in {len(tensors)} tensors")
    with torch.device("meta"):
        wanted = {name: tuple(p.shape) for name, p in Eagle3Draft(shape).trainable().items()}
    embedding = None if shape.has_own_embedding else tensors.pop("embed_tokens.weight", None)
    if d2t is None and shape.vocab_size != shape.target_vocab_size:
        raise UserError(
            f"{folder} drafts {shape.vocab_size} of {shape.target_vocab_size} ids but has no d2t",
            hint="the folder is incomplete; download it again",
        )
    check_tensors(folder, wanted, tensors)
    target_ids = target_ids_of(folder, d2t, shape.vocab_size)
    return StoredDraft("eagle3", shape, aux_layer_ids, target_ids, tensors, embedding, config)


def _own_name(name: str) -> str:
    """Return this draft's name of a tensor; SafeAILab and SpecForge call the only layer midlayer."""
    return name.replace("midlayer.", "layers.0.")


def _shape(
    config: Mapping[str, Any], inside: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> DraftConfig:
    width, heads = int(inside["hidden_size"]), int(inside["num_attention_heads"])
    target_width = config.get("target_hidden_size") or width
    rope = dict(inside.get("rope_parameters") or inside.get("rope_scaling") or {})
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    rope = {"rope_type": "default", "rope_theta": float(inside.get("rope_theta", 10000.0)), **rope}
    latent = _latent_attention(inside)
    return DraftConfig(
        hidden_size=width,
        target_hidden_size=target_width,
        num_aux_layers=tensors["fc.weight"].shape[1] // target_width,
        vocab_size=config.get("draft_vocab_size") or inside.get("draft_vocab_size") or inside["vocab_size"],
        target_vocab_size=inside["vocab_size"],
        intermediate_size=inside["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=inside.get("num_key_value_heads") or heads,
        head_dim=latent_head_dim(latent) if latent else inside.get("head_dim") or width // heads,
        rms_norm_eps=inside.get("rms_norm_eps", _MISSING["rms_norm_eps"]),
        max_position_embeddings=inside.get("max_position_embeddings", _MISSING["max_position_embeddings"]),
        rope_parameters=latent_rope(rope) if latent else rope,
        fc_norm=bool(config.get("fc_norm", inside.get("fc_norm", False))),
        norm_output=bool(config.get("norm_output", inside.get("norm_output", False))),
        # In the speculators format a missing value means true.
        norm_before_residual=bool(config.get("norm_before_residual", inside is not config)),
        norm_before_fc=bool(config.get("norm_before_fc", inside.get("norm_before_fc", False))),
        num_layers=inside.get("num_hidden_layers", 1),
        sliding_window=None if latent else window_of(inside),  # engines give latent attention none
        latent_attention=latent,
    )


def _latent_attention(inside: Mapping[str, Any]) -> dict[str, int] | None:
    """Return ranks and head widths of a draft with latent attention; a Llama-like one has none."""
    if not inside.get("kv_lora_rank"):
        return None
    return whole_latent({key: inside.get(key) for key in LATENT_KEYS}, "this draft")


def _aux_layer_ids(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    top = config.get("eagle_aux_hidden_state_layer_ids")
    if top:
        return tuple(top)
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return from_output_of(nested) if nested else None
