"""Reads a TargetSpec and a tokenizer from a model folder; no weights are loaded."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eyas.config.schema import TargetSettings
from eyas.errors import UserError
from eyas.layer_ids import check_aux_layer_ids, default_aux_layer_ids
from eyas.targets.architectures import Family, family_of
from eyas.targets.config import latent_attention, read_config
from eyas.targets.weights import Weights
from eyas.types import TargetSpec

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tiktoken.model")


def read_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a target's tokenizer.

    Raises: UserError when it has none, or no chat template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises a bare Exception for a damaged tokenizer.json
        raise UserError(
            f"{folder} has no tokenizer that loads: {(str(error) or type(error).__name__).splitlines()[0]}",
            hint="set target.trust_remote_code=true if you trust the code in the model folder"
            if "trust_remote_code" in str(error)
            else "a target folder needs tokenizer.json (or its tokenizer's own files)",
        ) from None
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer in {folder} has no chat template, so this is not a chat model",
            hint="use the instruct variant, or add the server's template as chat_template.jinja",
        )
    return tokenizer


def read_target(
    folder: Path,
    settings: TargetSettings,
    default_ids: Callable[[int], tuple[int, ...]] = default_aux_layer_ids,
) -> TargetSpec:
    """Describe the target in ``folder``; ``default_ids`` gives the aux layers of a target by its depth.

    Raises: UserError for an unsupported architecture, weights that are not all there, layer ids beyond
    the depth, head counts that do not divide, or a tokenizer with more ids than the embedding has rows.
    """
    config = read_config(folder, settings.trust_remote_code)
    architecture = (config.architectures or ["(none named)"])[0]
    family = family_of(architecture)
    text = config.get_text_config()
    weights = Weights(folder)
    weights.check_complete()
    tokenizer = read_tokenizer(folder, settings.trust_remote_code)
    if len(tokenizer) > text.vocab_size:
        raise UserError(
            f"the tokenizer in {folder} has {len(tokenizer)} ids "
            f"but the embedding only {text.vocab_size} rows",
            hint="the tokenizer is another model's, or tokens were added without resizing the embedding",
        )
    num_layers = text.num_hidden_layers
    aux = settings.aux_layer_ids
    latent = latent_attention(text)
    heads = text.num_attention_heads
    # Attention over latents reads them through as many key heads as query heads.
    kv_heads = heads if latent else getattr(text, "num_key_value_heads", None) or heads
    dtype = (
        settings.dtype if settings.dtype != "auto" else str(text.dtype or "float32").removeprefix("torch.")
    )
    return TargetSpec(
        model=settings.model,
        revision=settings.revision,
        architecture=architecture,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_layers=num_layers,
        aux_layer_ids=default_ids(num_layers) if aux is None else check_aux_layer_ids(aux, num_layers),
        dtype=dtype,
        norm_kind=family.norm_kind,
        norm_eps=getattr(text, family.norm_eps_key),
        logit_softcap=getattr(text, family.softcap_key) if family.softcap_key else None,
        logit_scale=_logit_scale(text, family),
        tied_head=_is_tied(weights, config, text),
        eos_token_ids=_eos_token_ids(folder, tokenizer, text.eos_token_id),
        tokenizer_fingerprint=_fingerprint_files(folder, _TOKENIZER_FILES),
        template_fingerprint=hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16],
        weights_fingerprint=_fingerprint_weights(weights),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_head_dim(text, heads, latent),
        intermediate_size=_mlp_width(text),
        max_position_embeddings=text.max_position_embeddings,
        rope_parameters=dict(text.rope_parameters or {}),
        latent_attention=latent,
    )


def _logit_scale(text: Any, family: Family) -> float:
    """Return what the target multiplies its logits by."""
    if family.logit_divisor_key:
        return 1.0 / float(getattr(text, family.logit_divisor_key))
    return float(getattr(text, family.logit_scale_key)) if family.logit_scale_key else 1.0


def _is_tied(weights: Weights, config: Any, text: Any) -> bool:
    """Return whether the head is the embedding: what is there counts before what the configuration says.

    Raises: UserError when the configuration says that there is a head of its own and none is there.
    """
    says_tied = bool(text.tie_word_embeddings)
    if weights.head is None and not (says_tied or config.tie_word_embeddings):
        raise UserError(
            f"{weights.files.where} holds no lm_head, and its config.json does not tie it",
            hint="the model folder is damaged or of another kind; download it again",
        )
    return says_tied or weights.head is None


def _mlp_width(text: Any) -> int:
    """Return the width of the target's dense MLP; a mixture of experts may name none."""
    dense = getattr(text, "intermediate_size_mlp", None) or getattr(text, "intermediate_size", None)
    return int(dense or 3 * text.hidden_size)


def _head_dim(text: Any, heads: int, latent: Mapping[str, Any] | None) -> int:
    if latent:
        return int(latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"])
    named = getattr(text, "head_dim", None)
    if named:
        return int(named)
    if text.hidden_size % heads:
        raise UserError(
            f"hidden size {text.hidden_size} does not divide into {heads} attention heads",
            hint="check num_attention_heads in the target's config.json",
        )
    return int(text.hidden_size // heads)


def _eos_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase, configured: Any) -> tuple[int, ...]:
    """Collect the ids that end an answer, as servers do: generation config, configuration, tokenizer."""
    generation = folder / "generation_config.json"
    values = [configured, tokenizer.eos_token_id]
    if generation.is_file():
        values.append(json.loads(generation.read_text()).get("eos_token_id"))
    ids: set[int] = set()
    for value in values:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    if not ids:
        raise UserError(f"{folder} names no end-of-turn token", hint="add eos_token_id to its config.json")
    return tuple(sorted(ids))


def _fingerprint_files(folder: Path, names: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in names:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    return digest.hexdigest()[:16]


def _fingerprint_weights(weights: Weights) -> str:
    """Identify the weights by the size, the first and the last 64 KiB of each file.

    The first bytes of a safetensors file list its tensors; fine-tunes of one model differ in the last.
    """
    digest = hashlib.sha256()
    files = weights.files
    for name in weights.file_names:
        size = files.size(name) or 0
        digest.update(f"{name}\0{size}\0".encode() + files.read(name, 0, min(size, 1 << 16)))
        digest.update(files.read(name, max(0, size - (1 << 16)), size))
    return digest.hexdigest()[:16]
