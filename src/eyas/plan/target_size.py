"""What can be known of a target from its config.json alone: enough to plan a run without its weights."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.config.schema import TargetSettings
from eyas.errors import EyasError, UserError
from eyas.files import read_json
from eyas.layer_ids import check_aux_layer_ids, default_aux_layer_ids
from eyas.targets.architectures import family_of
from eyas.targets.demo import DEMO_PREFIX
from eyas.targets.files import unreachable
from eyas.targets.resolve_model import locate
from eyas.targets.spec import read_target
from eyas.targets.weights import Weights
from eyas.types import LATENT_KEYS, TargetSpec

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
    settings: TargetSettings, default_ids: Callable[[int], tuple[int, ...]] = default_aux_layer_ids
) -> TargetSize:
    """Describe the target; of a hub model only config.json is fetched.

    Raises: UserError when there is no config.json, or it lacks what every decoder has.
    """
    folder, is_here = _folder(settings)
    try:
        config: dict[str, Any] = read_json(folder / "config.json")
    except ValueError as error:
        raise UserError(f"cannot read {folder / 'config.json'}: {error}", hint="copy it again") from None
    text = config.get("text_config") or config
    trouble = None
    try:
        if is_here:
            spec = read_target(folder, settings, default_ids)
        else:
            spec = _bare_spec(config, text, settings, folder, default_ids)
            family_of(spec.architecture)
    except EyasError as error:
        trouble = error.what
        spec = _bare_spec(config, text, settings, folder, default_ids)
    parameters, routed = count_parameters(text)
    weight_bytes, basis = _weight_bytes(folder, config, text, parameters, routed, spec.dtype)
    return TargetSize(
        spec=spec,
        num_parameters=parameters,
        weight_bytes=weight_bytes,
        weight_basis=basis,
        kv_bytes_per_token=_kv_bytes(text, spec),
        latent_cache=bool(text.get("kv_lora_rank")),
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


def _folder(settings: TargetSettings) -> tuple[Path, bool]:
    """Return where config.json lies, and whether the rest should lie there too."""
    name = settings.model
    named_as_folder = name.startswith((DEMO_PREFIX, ".", "/", "~")) or name.count("/") != 1
    if named_as_folder or Path(name).is_dir():
        return locate(name, settings.revision), True
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json", revision=settings.revision)).parent, False
    except unreachable() as error:
        raise UserError(
            f"config.json of target.model={name} cannot be fetched ({type(error).__name__})",
            hint="put it into a folder and plan with target.model=FOLDER; a plan needs no weights",
        ) from None


def _bare_spec(
    config: dict[str, Any],
    text: dict[str, Any],
    settings: TargetSettings,
    folder: Path,
    default_ids: Callable[[int], tuple[int, ...]],
) -> TargetSpec:
    try:
        layers, heads = text["num_hidden_layers"], text["num_attention_heads"]
        aux = settings.aux_layer_ids
        dtype = (
            text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
        )
        return TargetSpec(
            model=settings.model,
            revision=settings.revision,
            architecture=(config.get("architectures") or ["unknown"])[0],
            hidden_size=text["hidden_size"],
            vocab_size=text["vocab_size"],
            num_layers=layers,
            aux_layer_ids=default_ids(layers) if aux is None else check_aux_layer_ids(aux, layers),
            dtype=settings.dtype if settings.dtype != "auto" else (dtype or "bfloat16"),
            norm_kind="rms",
            norm_eps=text.get("rms_norm_eps", 1e-6),
            logit_softcap=None,
            logit_scale=1.0,
            tied_head=bool(text.get("tie_word_embeddings")),
            eos_token_ids=(0,),
            tokenizer_fingerprint="unknown",
            template_fingerprint="unknown",
            weights_fingerprint="unknown",
            num_attention_heads=heads,
            num_key_value_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or text["hidden_size"] // heads,
            intermediate_size=text["intermediate_size"],
            max_position_embeddings=text.get("max_position_embeddings", 0),
            latent_attention={key: text.get(key) for key in LATENT_KEYS}
            if text.get("kv_lora_rank")
            else None,
        )
    except KeyError as error:
        raise UserError(
            f"{folder / 'config.json'} has no {error.args[0]}", hint="a plan needs the decoder's shape"
        ) from None


def _weight_bytes(
    folder: Path, config: dict[str, Any], text: dict[str, Any], parameters: int, routed: int, dtype: str
) -> tuple[int, str]:
    with contextlib.suppress(UserError):  # it may not be here, or not whole
        if files := Weights(folder).num_bytes:
            return files, "its files"
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        size = json.loads(index.read_text(encoding="utf-8")).get("metadata", {}).get("total_size")
        if size:
            return int(size), "its index"
    quantized = text.get("quantization_config") or config.get("quantization_config") or {}
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
    if text.get("kv_lora_rank"):
        return int(spec.num_layers * (text["kv_lora_rank"] + text["qk_rope_head_dim"]) * 2)
    return spec.num_layers * 2 * spec.num_key_value_heads * spec.head_dim * 2
