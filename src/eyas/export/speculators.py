"""The speculators format: the same tensors under a config.json that names target and method.

vLLM starts it by ``vllm serve FOLDER`` alone, for the folder says what the target is. Source: configurations
of published checkpoints and vLLM's ``transformers_utils/configs/speculators``.
"""

from pathlib import Path
from typing import Any

from eyas.drafters.eagle3.config import DraftConfig
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.errors import UserError
from eyas.export.native import VllmExporter, engine_config
from eyas.files import sha256_of_file, write_json
from eyas.types import TargetSpec, VocabMap

_VERSION = "0.9.0"  # of the format that is written
_DRAFT_TOKENS = 3  # what a server starts with unless told otherwise
# Of the native configuration, what describes the layer; the rest has names of its own.
_LAYER_KEYS = (
    "model_type", "hidden_act", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "max_position_embeddings", "rope_parameters",
    "attention_bias", "mlp_bias", "vocab_size", "tie_word_embeddings", "torch_dtype",
    # vLLM hands on what stands here, and asks for it when there are not three aux layers.
    "num_aux_hidden_states",
)  # fmt: skip


class SpeculatorsExporter(VllmExporter):
    """Writes and verifies as the native exporter does, but for config.json."""

    def write_config(self, folder: Path, draft: Eagle3Draft, spec: TargetSpec, vocab: VocabMap) -> None:
        check_servable(draft.config)
        native = engine_config(draft.config, spec, vocab)
        native["eyas"]["weights_sha256"] = sha256_of_file(folder / "model.safetensors")
        write_json(folder / "config.json", speculators_config(native))


def check_servable(config: DraftConfig) -> None:
    """Raises: UserError for latent attention: in this format vLLM reads Llama and Qwen3 layers only."""
    if config.latent_attention is not None:
        raise UserError(
            "a draft with latent attention has no speculators form that vLLM loads",
            hint="set export.format=vllm",
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
        "transformer_layer_config": {key: native[key] for key in _LAYER_KEYS},
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
