"""What can be known of a target from its config.json alone: enough to plan a run without its weights."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.config.schema import TargetSettings
from eyas.errors import EyasError, UserError
from eyas.files import read_json
from eyas.layer_ids import default_aux_layer_ids
from eyas.targets.architectures import family_of
from eyas.targets.config import quantization
from eyas.targets.resolve_model import locate_config
from eyas.targets.spec import LayerChoice, outline_config, read_outline, read_target
from eyas.targets.weights import INDEX, Weights
from eyas.types import TargetSpec

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class TargetSize:
    """A target as a plan sees it. ``trouble`` is why eyas could not run it as it lies there, or None."""

    spec: TargetSpec
    num_parameters: int
    weight_bytes: int
    weight_basis: str
    kv_bytes_per_token: int
    latent_cache: bool  # one compressed entry a token, which every tensor-parallel rank holds whole
    trouble: str | None
    is_here: bool  # False: a hub model of which only config.json was fetched


def read_target_size(
    settings: TargetSettings, default_ids: LayerChoice = default_aux_layer_ids
) -> TargetSize:
    """Describe the target; of a hub model only config.json is fetched.

    Raises: UserError when there is no config.json, or it lacks what every decoder has.
    """
    folder, is_here = locate_config(settings.model, settings.revision)
    trouble, read = None, read_target if is_here else read_outline
    try:
        spec = read(folder, settings, default_ids)
        family_of(spec.architecture)
    except EyasError as error:
        trouble = error.what
        spec = read_outline(folder, settings, default_ids)
    config = outline_config(folder, settings)
    text: dict[str, Any] = config.get_text_config().to_dict()
    parameters, routed = count_parameters(text)
    quantized = quantization(folder)
    weight_bytes, basis = _weight_bytes(folder, quantized, parameters, routed, spec.dtype)
    return TargetSize(
        spec=spec,
        num_parameters=parameters,
        weight_bytes=weight_bytes,
        weight_basis=basis,
        kv_bytes_per_token=_kv_bytes(text, spec),
        latent_cache=spec.latent_attention is not None,
        trouble=trouble,
        is_here=is_here,
    )


def count_parameters(text: dict[str, Any]) -> tuple[int, int]:
    """Return all parameters of a decoder's config, and those of routed experts among them; norms left out."""
    width, layers, heads = text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"]
    if text.get("kv_lora_rank"):  # multi-head latent attention (DeepSeek-V2)
        nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
        rank, query_rank = text["kv_lora_rank"], text.get("q_lora_rank")
        queries = (
            width * query_rank + query_rank * heads * (nope + rope)
            if query_rank
            else width * heads * (nope + rope)
        )
        attention = queries + width * (rank + rope) + rank * heads * (nope + value) + heads * value * width
    else:
        head = text.get("head_dim") or width // heads
        attention = 2 * width * head * (heads + (text.get("num_key_value_heads") or heads))
    experts = text.get("n_routed_experts") or text.get("num_experts") or text.get("num_local_experts") or 0
    dense_layers = layers if not experts else text.get("first_k_dense_replace", 0)
    moe_width = text.get("moe_intermediate_size") or text.get("intermediate_size", 0)
    routed = (layers - dense_layers) * experts * 3 * width * moe_width
    shared = (layers - dense_layers) * (
        (text.get("n_shared_experts") or 0) * 3 * width * moe_width + experts * width
    )
    dense = dense_layers * 3 * width * text.get("intermediate_size", 0)
    tied = 1 if text.get("tie_word_embeddings") else 2
    return layers * attention + routed + shared + dense + tied * text["vocab_size"] * width, routed


def _weight_bytes(
    folder: Path, quantized: dict[str, Any], parameters: int, routed: int, dtype: str
) -> tuple[int, str]:
    with contextlib.suppress(UserError):  # it may not be here, or not whole
        if files := Weights(folder).num_bytes:
            return files, "its files"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if size := read_json(folder / INDEX).get("metadata", {}).get("total_size"):
            return int(size), "its index"
    bits = _bits(quantized)
    plain = ITEMSIZE[dtype]
    if bits is None:
        return parameters * plain, f"{parameters / 1e9:,.1f} billion parameters of {dtype}"
    # Where there are experts, they are what is quantised to 4 bits; else all matrices are.
    small = routed if routed and bits < 8 else parameters
    size = round(small * bits / 8) + (parameters - small) * plain
    return (
        size,
        f"{parameters / 1e9:,.1f} billion parameters, {small / parameters:.0%} of them in {bits:g} bits",
    )


def _bits(quantized: dict[str, Any]) -> float | None:
    """Return bits a weight, scales included, of a config.json's quantization_config."""
    if not quantized:
        return None
    if quantized.get("quant_method") == "fp8":
        return 8.0
    groups = (quantized.get("config_groups") or {}).values()
    weights = next((g["weights"] for g in groups if g.get("weights")), quantized)
    bits = weights.get("num_bits") or weights.get("bits")
    group = weights.get("group_size")
    return None if not bits else bits + (16 / group if group and group > 0 else 0)


def _kv_bytes(text: dict[str, Any], spec: TargetSpec) -> int:
    """Return bytes that one token takes in a 16-bit key/value cache of the whole model."""
    if spec.latent_attention is not None:
        return int(spec.num_layers * (text["kv_lora_rank"] + text["qk_rope_head_dim"]) * 2)
    return spec.num_layers * 2 * spec.num_key_value_heads * spec.head_dim * 2
