"""Reads block drafts as they are published: native configurations and the speculators format.

Whatever this draft does not compute is refused by name; nothing is read past in silence.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eyas.drafters.common.block.config import BlockConfig
from eyas.drafters.common.block.model import BlockDraft
from eyas.drafters.common.stored import StoredDraft, check_tensors, target_ids_of
from eyas.drafters.common.window import SLIDING
from eyas.errors import ContractError, UserError
from eyas.layer_ids import from_output_of

_AGAIN = "export, copy or download it again"
_LEAVE_OUT = "train one from the target instead: leave draft.init_from out"
# Keys that name something this draft does not compute, wherever a configuration holds them.
_REFUSED = {
    "attention_bias": "has biases in its attention",
    "quantization_config": "is quantised",
    "projector_type": "has a projector of another kind",
    "conv_kernel_size": "has convolutions",
    "selector_rank": "has a candidate selector",
    "attention_sink_bias": "has attention sinks",
    "add_swa_attention_sink_bias": "has attention sinks",
    "attention_value_scale": "scales its values",
    "input_embedding_scale": "scales its embedding",
}


def is_of_kind(config: Mapping[str, Any], kind: str, architectures: Sequence[str]) -> bool:
    """Whether a config.json, native or of the speculators format, describes a draft of this kind."""
    found = config.get("speculators_model_type")
    if found:
        return bool(found == kind)
    return bool({str(name) for name in config.get("architectures") or ()} & set(architectures))


def refuse_others(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises: UserError for a draft with parts that eyas does not compute; no tensor is read."""
    nested = (config.get("transformer_layer_config") or {}, config.get("dflash_config") or {})
    for key, what in _REFUSED.items():
        if any(place.get(key) for place in (config, *nested)):
            raise UserError(
                f"the draft in {folder} {what} ({key}), which eyas does not compute", hint=_LEAVE_OUT
            )
    inside = nested[0] or config
    if not inside.get("is_neox_style", True):
        raise UserError(
            f"the draft in {folder} rotates neighbours, eyas rotates halves (is_neox_style)", hint=_LEAVE_OUT
        )
    if len(set(_layers(config))) > 1:
        raise UserError(
            f"layers of the draft in {folder} differ in window or causality, and engines differ in what they "
            "make of that",
            hint=_LEAVE_OUT,
        )


def shape_of(config: Mapping[str, Any], num_aux_layers: int) -> dict[str, Any]:
    """Return the fields of a BlockConfig that both formats hold.

    What a config.json lacks is Python's own error.
    """
    inside = config.get("transformer_layer_config") or config
    dflash = config.get("dflash_config") or {}
    width, heads = int(inside["hidden_size"]), int(inside["num_attention_heads"])
    num_layers = int(inside["num_hidden_layers"])
    rope = dict(inside.get("rope_parameters") or inside.get("rope_scaling") or {})
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    rope = {"rope_type": "default", "rope_theta": float(inside.get("rope_theta") or 10000.0), **rope}
    layers = _layers(config)
    mask = dflash["mask_token_id"] if "mask_token_id" in dflash else config["mask_token_id"]
    return {
        "hidden_size": width,
        "num_aux_layers": num_aux_layers,
        "vocab_size": config.get("draft_vocab_size") or inside["vocab_size"],
        "target_vocab_size": inside["vocab_size"],
        "intermediate_size": inside["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": inside.get("num_key_value_heads") or heads,
        "head_dim": inside.get("head_dim") or width // heads,
        "rms_norm_eps": inside.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": inside["max_position_embeddings"],
        "rope_parameters": rope,
        "num_layers": num_layers,
        "block_size": int(config["block_size"]),
        "mask_token_id": int(mask),
        "causal": layers[0][1],
        "sliding_window": layers[0][0],
        "logit_scale": float(inside.get("logit_scale") or 1.0),
    }


def aux_layer_ids_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids L after L layers. Raises: UserError without a list, or when two disagree."""
    dflash = config.get("dflash_config") or {}
    keys = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
    found = [tuple(config[key]) for key in keys if config.get(key)]
    outputs = (dflash.get("target_layer_ids"), config.get("target_layer_ids"))
    found += [from_output_of(ids) for ids in outputs if ids]
    if not found:
        raise UserError("the draft's config.json names no aux layers", hint=_AGAIN)
    if len(set(found)) > 1:
        lists = " and ".join(str(list(ids)) for ids in sorted(set(found)))
        raise UserError(f"the draft's config.json names different aux layers: {lists}", hint=_AGAIN)
    return found[0]


def read_block_draft(
    folder: Path,
    architecture: str,
    shape: BlockConfig,
    draft_class: type[BlockDraft],
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
) -> StoredDraft:
    """Return the draft of a folder whose config.json has been understood.

    Raises: ContractError for unknown or missing tensors, or a vocabulary without its map.
    """
    if shape.num_layers > len(tensors):  # before they are made
        raise ValueError(f"{shape.num_layers} layers in {len(tensors)} tensors")
    d2t, head = tensors.pop("d2t", None), tensors.pop("lm_head.weight", None)
    embedding = tensors.pop("embed_tokens.weight", None)
    tensors.pop("t2d", None)
    if not shape.has_full_vocabulary and (d2t is None or head is None):
        raise ContractError(
            f"{folder} drafts {shape.vocab_size} of {shape.target_vocab_size} ids but has no "
            f"{'d2t' if d2t is None else 'lm_head.weight'}",
            hint="the folder is incomplete; export or download it again",
        )
    if shape.has_full_vocabulary and d2t is not None:
        raise ContractError(f"{folder} drafts every id of the target and has a d2t, which vLLM refuses")
    with torch.device("meta"):
        wanted = {name: tuple(p.shape) for name, p in draft_class(shape).trainable().items()}
    check_tensors(folder, wanted, tensors)
    target_ids = target_ids_of(folder, d2t, shape.vocab_size)
    ids = aux_layer_ids_of(config)
    return StoredDraft(architecture, shape, ids, target_ids, tensors, embedding, config)


def _layers(config: Mapping[str, Any]) -> list[tuple[int | None, bool]]:
    """Return each layer's window and causality as vLLM decides them."""
    inside = config.get("transformer_layer_config") or config
    dflash = config.get("dflash_config") or {}
    return [
        (_window_of(inside, dflash, i), _is_causal(config, inside, dflash, i))
        for i in range(int(inside["num_hidden_layers"]))
    ]


def _window_of(inside: Mapping[str, Any], dflash: Mapping[str, Any], layer: int) -> int | None:
    """As vLLM decides: ``use_swa`` makes every layer slide unless some layer's type says so already."""
    types = list(inside.get("layer_types") or ())
    any_slides = SLIDING in types
    if not types or (dflash.get("use_swa") and not any_slides):
        slides = bool(dflash.get("use_swa"))
    else:
        slides = types[layer] == SLIDING
    if not slides:
        return None
    return int(dflash["swa_window_size"] if "swa_window_size" in dflash else inside["sliding_window"])


def _is_causal(
    config: Mapping[str, Any], inside: Mapping[str, Any], dflash: Mapping[str, Any], layer: int
) -> bool:
    """As vLLM decides: ``is_causal``, else the format's own key, else sliding layers are causal."""
    if inside.get("is_causal") is not None:
        return bool(inside["is_causal"])
    if inside is not config:  # the speculators format: absent means not causal
        return not config.get("sliding_window_non_causal", True)
    if dflash.get("causal") is not None:
        return bool(dflash["causal"])
    types = list(inside.get("layer_types") or ())
    return bool(types) and types[layer] == SLIDING
