"""The folder that vLLM and SGLang load: config.json and model.safetensors, verified by reloading.

Source: vLLM's ``llama_eagle3.py`` and its EAGLE configuration; SGLang's ``llama_eagle3.py``.
Latent attention: vLLM's ``deepseek_eagle3.py``.
"""

import re
from pathlib import Path
from typing import Any

import torch

from eyas.drafters.eagle3.config import DraftConfig
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.errors import ContractError
from eyas.export.read import read_draft
from eyas.files import sha256_of_file, write_json
from eyas.layer_ids import from_output_of, to_sglang
from eyas.safetensors_io import save_tensors
from eyas.types import TargetSpec, VocabMap

_UPPER_INPUT_NORM = re.compile(r"layers\.[1-9]\d*\.input_layernorm\.weight")


class VllmExporter:
    """Writes native EAGLE-3 tensor names; a shared embedding stays with the target."""

    def write(
        self,
        folder: Path,
        draft: Eagle3Draft,
        spec: TargetSpec,
        vocab: VocabMap,
        include_embedding: bool = False,
    ) -> None:
        dtype = getattr(torch, spec.dtype)
        tensors = {name: p.detach().cpu().to(dtype).contiguous() for name, p in draft.trainable().items()}
        for name in [n for n in tensors if _UPPER_INPUT_NORM.fullmatch(n)]:
            # SGLang calls it so in every layer, vLLM only in the first.
            tensors[name.replace("input_layernorm", "hidden_norm")] = tensors[name].clone()
        if include_embedding and not draft.config.has_own_embedding:
            tensors["embed_tokens.weight"] = draft.embed_tokens.weight.detach().cpu().to(dtype).contiguous()
        if not vocab.is_full:
            ids = torch.from_numpy(vocab.target_ids)
            # Engines compute target id = draft id + d2t[draft id].
            tensors["d2t"] = ids - torch.arange(len(ids))
            in_draft = torch.zeros(spec.vocab_size, dtype=torch.bool)
            in_draft[ids] = True
            tensors["t2d"] = in_draft
        save_tensors(tensors, folder / "model.safetensors", {"format": "pt"})
        self.write_config(folder, draft, spec, vocab)

    def write_config(self, folder: Path, draft: Eagle3Draft, spec: TargetSpec, vocab: VocabMap) -> None:
        config = engine_config(draft.config, spec, vocab)
        config["eyas"]["weights_sha256"] = sha256_of_file(folder / "model.safetensors")
        write_json(folder / "config.json", config)

    @torch.no_grad()
    def verify(
        self, folder: Path, draft: Eagle3Draft, vocab: VocabMap, aux: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Reload the folder and compare with the trainer's draft.

        ``aux`` [R, A, D] and ``tokens`` [R] are stored states of consecutive positions and the tokens
        that follow them.
        Raises: ContractError naming what disagrees.
        """
        reloaded, target_ids, config = load_export(
            folder, None if draft.config.has_own_embedding else draft.embed_tokens.weight
        )
        if not torch.equal(target_ids, torch.from_numpy(vocab.target_ids)):
            raise ContractError("the exported d2t does not give back the draft vocabulary")
        nested = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        if nested is not None and from_output_of(nested) != tuple(config["eagle_aux_hidden_state_layer_ids"]):
            raise ContractError("the two lists of aux layer ids in config.json disagree")
        if reloaded.config != draft.config:
            raise ContractError("the exported config.json describes another draft than the one trained")
        expected, found = _one_step(draft, aux, tokens), _one_step(reloaded, aux, tokens)
        worst = float((expected - found).abs().max() / expected.abs().max())
        tolerance = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 1e-2}[config["eyas"]["target"]["dtype"]]
        if not worst <= tolerance:
            raise ContractError(f"the exported draft's logits differ from the trained one's by {worst:.2e}")


def load_export(
    folder: Path, embedding: torch.Tensor | None
) -> tuple[Eagle3Draft, torch.Tensor, dict[str, Any]]:
    """Rebuild the draft, its target ids [W] and its config.json from an exported folder alone.

    ``embedding`` [V, D] is the target's, as engines share it; a draft of another width needs none.
    Raises: ContractError for an unknown or missing tensor, as vLLM does; UserError for a damaged folder.
    """
    stored = read_draft(folder)
    shape = stored.shape
    if embedding is None:
        if not shape.has_own_embedding:
            raise ContractError(f"{folder} holds no embedding of its own and was given none")
    elif (shape.target_vocab_size, shape.target_hidden_size) != tuple(embedding.shape):
        raise ContractError(
            f"{folder} is a draft for a target of {shape.target_vocab_size} ids and width "
            f"{shape.target_hidden_size}; this target has {tuple(embedding.shape)}",
            hint="export the draft that was trained for this target",
        )
    own = stored.embedding
    if own is not None and embedding is not None and not torch.equal(own, embedding.cpu().to(own.dtype)):
        raise ContractError(f"{folder} holds another embedding than this target's")
    if stored.aux_layer_ids is None or len(stored.aux_layer_ids) != shape.num_aux_layers:
        named = len(stored.aux_layer_ids or ())
        raise ContractError(f"{folder} names {named} aux layers, its fc takes {shape.num_aux_layers}")
    draft = Eagle3Draft(shape)
    with torch.no_grad():
        for name, parameter in draft.trainable().items():
            parameter.copy_(stored.tensors[name])
        if embedding is not None and not shape.has_own_embedding:
            draft.embed_tokens.weight.copy_(embedding)
    return draft, stored.target_ids, stored.config


def _one_step(draft: Eagle3Draft, aux: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of consecutive rows at their first step: every tensor and the rotary positions matter."""
    device = draft.embed_tokens.weight.device
    hidden = draft.fuse(aux.to(device, torch.float32))
    mixed = draft.mix(tokens.to(device), hidden)
    positions = torch.arange(len(tokens), device=device)
    for layer in range(draft.config.num_layers):
        if layer:
            mixed = draft.enter(hidden, layer)
        keys, values = draft.keys_values(mixed, positions, layer)
        q, k, v = (x.transpose(0, 1)[None] for x in (draft.queries(mixed, positions, layer), keys, values))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = draft.finish(attended[0].transpose(0, 1), hidden, layer)
    return draft.logits(draft.carry(hidden))


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


def engine_config(config: DraftConfig, spec: TargetSpec, vocab: VocabMap) -> dict[str, Any]:
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
            "eagle_aux_hidden_state_layer_ids": list(to_sglang(ids)),
        },
        "eyas": {
            "target": spec.to_json(),
            "target_fingerprint": spec.fingerprint,
            "vocab_fingerprint": vocab.fingerprint,
        },
    }
