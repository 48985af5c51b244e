"""Reads block drafts as they are published: native configurations and the speculators format.

Whatever this draft does not compute is refused by name; nothing is read past in silence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eyas.drafters.common.block_config import BlockConfig
from eyas.drafters.common.block_model import BlockDraft
from eyas.errors import ContractError, UserError
from eyas.files import read_json
from eyas.layer_ids import from_output_of

_AGAIN = "export, copy or download it again"
_SLIDING, _FULL = "sliding_attention", "full_attention"
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


@dataclass(frozen=True)
class StoredBlockDraft:
    """A draft's folder, read. ``tensors`` are by BlockDraft's names; target_ids [W]; ``aux_layer_ids``
    are ours (stream after L layers); ``config`` is its JSON."""

    shape: BlockConfig
    aux_layer_ids: tuple[int, ...]
    target_ids: torch.Tensor
    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]

    @torch.no_grad()
    def load_into(self, draft: BlockDraft, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Fill a draft of this shape; embedding and head [V, D] are the target's.

        Raises: ContractError when the folder's head is not the target's rows.
        """
        if tuple(embedding.shape) != (self.shape.target_vocab_size, self.shape.hidden_size):
            raise ContractError(
                f"a draft for a target of {self.shape.target_vocab_size} ids and width "
                f"{self.shape.hidden_size}; this target has {tuple(embedding.shape)}",
                hint="export the draft that was trained for this target",
            )
        rows = head[self.target_ids]
        own = self.tensors.get("lm_head.weight")
        if own is not None and not torch.equal(rows.cpu().to(own.dtype), own):
            raise ContractError("the draft's head is not the target's rows of the draft vocabulary")
        draft.share(embedding, rows)
        for name, parameter in draft.trainable().items():
            parameter.copy_(self.tensors[name])


def read_block_config(folder: Path, kind: str, architectures: Sequence[str]) -> dict[str, Any]:
    """Read config.json of a draft of a kind, known by one of its names.

    Raises: UserError when it is not there, damaged, or of another kind.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no draft: it has no config.json", hint="name what eyas export wrote")
    try:
        config: dict[str, Any] = read_json(path)
        names = [str(name) for name in config.get("architectures") or ()]
        places = [dict(config.get(key) or {}) for key in ("transformer_layer_config", "dflash_config")]
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} is damaged", hint=_AGAIN) from None
    found = config.get("speculators_model_type")
    if found != kind and (found is not None or not set(names) & set(architectures)):
        raise UserError(f"{folder} is no {kind} draft: its config.json names {found or ', '.join(names)}")
    for key, what in _REFUSED.items():
        if any(place.get(key) for place in (config, *places)):
            raise UserError(
                f"the draft in {folder} {what} ({key}), which eyas does not compute",
                hint="train one from the target instead: leave draft.init_from out",
            )
    return config


def shape_of(config: Mapping[str, Any], num_aux_layers: int) -> dict[str, Any]:
    """Return the fields of a BlockConfig that both formats hold.

    Raises: UserError for layers that are not alike; LookupError and ValueError for what is missing or odd.
    """
    inside = config.get("transformer_layer_config") or config
    dflash = config.get("dflash_config") or {}
    width, heads = int(inside["hidden_size"]), int(inside["num_attention_heads"])
    num_layers = int(inside["num_hidden_layers"])
    rope = dict(inside.get("rope_parameters") or inside.get("rope_scaling") or {})
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    rope = {"rope_type": "default", "rope_theta": float(inside.get("rope_theta") or 10000.0), **rope}
    layers = [
        (_window_of(inside, dflash, i), _is_causal(config, inside, dflash, i)) for i in range(num_layers)
    ]
    if len(set(layers)) != 1:
        raise UserError(
            "the draft's layers differ in window or causality, and engines differ in what they make of that",
            hint="train one from the target instead: leave draft.init_from out",
        )
    if inside.get("is_neox_style", True) is not True:
        raise UserError("the draft rotates neighbours, eyas rotates halves (is_neox_style)")
    mask = dflash.get("mask_token_id", config.get("mask_token_id"))
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
    """Return the ids L after L layers. Raises: UserError when two lists disagree or there is none."""
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


def read_block_tensors(folder: Path, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Read the weights: those ``wanted`` by name and shape, and what belongs to a reduced vocabulary.

    Raises: UserError for damaged files; ContractError for unknown or missing tensors, or another shape.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no *.safetensors weights", hint="copy or download the draft again")
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (a safe_open handle is no mapping)
                    if name in tensors:
                        raise ContractError(f"{folder} holds {name} twice")
                    tensors[name] = file.get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{path} is damaged: {error}", hint=_AGAIN) from None
    optional = {"d2t", "t2d", "lm_head.weight", "embed_tokens.weight"}
    if wrong := set(wanted) ^ (set(tensors) - optional):
        raise ContractError(
            f"{folder} has unknown or missing tensors: {sorted(wrong)}",
            hint="the folder is damaged or of another kind; export or download it again",
        )
    for name, expected in wanted.items():
        if tuple(tensors[name].shape) != expected:
            raise ContractError(
                f"{folder}: {name} is {tuple(tensors[name].shape)}, its config.json asks for {expected}"
            )
    return tensors


def read_stored(
    folder: Path, config: dict[str, Any], draft_class: type[BlockDraft], shape: BlockConfig
) -> StoredBlockDraft:
    """Read the tensors of a folder whose config.json has been understood. Raises: as its parts."""
    with torch.device("meta"):
        wanted = {name: tuple(p.shape) for name, p in draft_class(shape).trainable().items()}
    tensors = read_block_tensors(folder, wanted)
    d2t = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    tensors.pop("embed_tokens.weight", None)
    if (d2t is None) != shape.has_full_vocabulary:
        raise ContractError(
            f"{folder} drafts {shape.vocab_size} of {shape.target_vocab_size} ids and "
            f"{'has no' if d2t is None else 'has a'} d2t",
            hint="the folder is incomplete; export or download it again",
        )
    if shape.has_full_vocabulary:
        tensors.pop("lm_head.weight", None)
    elif "lm_head.weight" not in tensors:
        raise ContractError(f"{folder} drafts a reduced vocabulary but has no lm_head.weight")
    offsets = torch.zeros(shape.vocab_size, dtype=torch.long) if d2t is None else d2t.long()
    if offsets.shape != (shape.vocab_size,):
        raise ContractError(
            f"{folder}: d2t is {tuple(offsets.shape)}, its config.json asks for {shape.vocab_size}"
        )
    target_ids = torch.arange(len(offsets)) + offsets
    return StoredBlockDraft(shape, aux_layer_ids_of(config), target_ids, tensors, config)


def _window_of(inside: Mapping[str, Any], dflash: Mapping[str, Any], layer: int) -> int | None:
    """As vLLM decides: ``use_swa`` makes every layer slide unless some layer's type says so already."""
    types = inside.get("layer_types")
    any_slides = bool(types) and _SLIDING in types
    if not types or (dflash.get("use_swa") and not any_slides):
        slides = bool(dflash.get("use_swa"))
    else:
        slides = types[layer] == _SLIDING
    return int(dflash.get("swa_window_size", inside.get("sliding_window"))) if slides else None


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
    types = inside.get("layer_types")
    return bool(types) and types[layer] == _SLIDING
