"""What engines load of a block draft: tensors and config.json, native or in the speculators format.

Every silent trap is closed by writing what an engine would otherwise guess: causality under each of its
names and the same for all layers, the window, the rotary layout, aux layers in both conventions, whether
the anchor's slot predicts. Source: vLLM's ``qwen3_dflash.py``, ``eagle3_utils.py`` and
``transformers_utils/configs/speculators``; SGLang's ``dflash.py``.
"""

from collections.abc import Mapping
from typing import Any

import torch

from eyas.drafters.common.block.attention import BlockPlaces, PlainBlockAttention
from eyas.drafters.common.block.config import BlockConfig
from eyas.drafters.common.block.model import BlockDraft
from eyas.drafters.common.window import window_keys
from eyas.errors import ContractError
from eyas.layer_ids import from_output_of, to_output_of
from eyas.types import TargetSpec, VocabMap

_VERSION = "0.9.0"  # of the speculators format that is written
# Of the native configuration, what speculators' readers find in the description of a layer.
_LAYER_KEYS = (
    "model_type", "hidden_act", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
    "rope_parameters", "rope_theta", "rope_scaling", "is_neox_style", "attention_bias", "vocab_size",
    "tie_word_embeddings", "torch_dtype", "layer_types", "sliding_window", "use_sliding_window",
    "max_window_layers", "is_causal", "num_target_layers", "logit_scale", "mask_token_id", "block_size",
)  # fmt: skip


def block_tensors(draft: BlockDraft) -> dict[str, torch.Tensor]:
    """Return the trained weights, and of a reduced vocabulary the target's rows of it.

    The head of the whole vocabulary stays with the target.
    """
    tensors: dict[str, torch.Tensor] = {name: p.detach() for name, p in draft.trainable().items()}
    if not draft.config.has_full_vocabulary:
        tensors["lm_head.weight"] = draft.lm_head.weight.detach()
    return tensors


@torch.no_grad()
def block_states(draft: BlockDraft, aux: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the normed hidden states [K, D] of a block after consecutive rows: every weight of the backbone
    and the positions matter. Shapes: aux [R, A, D], tokens [R], the one after each."""
    device = draft.embed_tokens.weight.device
    places = BlockPlaces.of_sequence(len(aux), len(aux), device)
    context = draft.context(aux.to(device, torch.float32), places.positions)
    attend = PlainBlockAttention(draft.config, places)
    hidden: torch.Tensor = draft(tokens[-1:].to(device), places.anchor_positions, context, attend)
    return hidden[0]


def check_config(config: Mapping[str, Any]) -> None:
    """Raises: ContractError when lists of aux layers disagree, or keys of causality do."""
    outputs_of = config["dflash_config"]["target_layer_ids"] if "dflash_config" in config else None
    ours = config.get("eagle_aux_hidden_state_layer_ids")
    if outputs_of is not None and from_output_of(outputs_of) != tuple(ours or ()):
        raise ContractError("the two lists of aux layer ids in config.json disagree")
    if outputs_of is not None and config["dflash_config"]["causal"] != config["is_causal"]:
        raise ContractError("is_causal and dflash_config.causal in config.json disagree")


def native_config(
    config: BlockConfig, spec: TargetSpec, vocab: VocabMap, architecture: str, further: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the native config.json; ``further`` are the kind's own keys.

    Raises: UserError for aux layer 0, which has no id in "output of layer i".
    """
    outputs_of = list(to_output_of(spec.aux_layer_ids))
    rope = dict(config.rope_parameters)
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    window = config.sliding_window
    dflash: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": outputs_of,
        "causal": config.causal,
        "use_swa": window is not None,
    }
    if window is not None:
        dflash["swa_window_size"] = window
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        # Newer engines read rope_parameters, older ones the two keys that it replaced.
        "rope_parameters": rope,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
        "is_neox_style": True,
        "attention_bias": False,
        "vocab_size": config.target_vocab_size,
        "draft_vocab_size": len(vocab),
        "tie_word_embeddings": False,
        "torch_dtype": spec.dtype,
        "bos_token_id": None,
        "eos_token_id": list(spec.eos_token_ids),
        "logit_scale": config.logit_scale,
        # Qwen3's configuration drops a window that use_sliding_window does not confirm.
        **window_keys(window, config.num_layers),
        "use_sliding_window": window is not None,
        "max_window_layers": 0,
        "is_causal": config.causal,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "num_target_layers": spec.num_layers,
        "target_hidden_size": spec.hidden_size,
        # vLLM's runner reads the ids L after L layers, the draft's own classes "output of layer i".
        "eagle_aux_hidden_state_layer_ids": list(spec.aux_layer_ids),
        "dflash_config": dflash,
        **further,
    }


def speculators_config(
    native: Mapping[str, Any], algorithm: str, num_draft_tokens: int, further: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the speculators form of a native configuration; ``further`` are the kind's own keys.

    A server starts with ``num_draft_tokens`` unless told otherwise.
    """
    spec = native["eyas"]["target"]
    return {
        "speculators_model_type": algorithm,
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}],
            "verifier": {"name_or_path": spec["model"], "architectures": [spec["architecture"]]},
        },
        "transformer_layer_config": {key: native[key] for key in _LAYER_KEYS},
        "aux_hidden_state_layer_ids": native["eagle_aux_hidden_state_layer_ids"],
        "block_size": native["block_size"],
        "mask_token_id": native["mask_token_id"],
        "draft_vocab_size": native["draft_vocab_size"],
        "target_hidden_size": native["target_hidden_size"],
        # Absent it means true, and vLLM then serves every layer bidirectional.
        "sliding_window_non_causal": not native["is_causal"],
        "tie_word_embeddings": False,
        "dtype": native["torch_dtype"],
        **further,
        "eyas": native["eyas"],
    }
