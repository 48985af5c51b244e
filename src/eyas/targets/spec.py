"""What a target is, read from its folder; the one place that makes a TargetSpec. No weights are loaded."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas.config.schema import TargetSettings
from eyas.errors import UserError
from eyas.layer_ids import check_aux_layer_ids, default_aux_layer_ids
from eyas.targets.architectures import FAMILIES, Family, family_of
from eyas.targets.config import latent_attention, plain_config, read_config
from eyas.targets.tokenizer import (
    check_ids,
    eos_token_ids,
    fingerprint_template,
    fingerprint_tokenizer,
    read_tokenizer,
)
from eyas.targets.weights import Weights
from eyas.targets.weights_fingerprint import fingerprint_as, fingerprint_weights
from eyas.types import TargetSpec

# What only weights or tokenizer could tell, in a description that is made without them.
UNKNOWN = "unknown"
# The aux layers of a target, by its depth.
LayerChoice = Callable[[int], tuple[int, ...]]
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def read_target(
    folder: Path, settings: TargetSettings, default_ids: LayerChoice = default_aux_layer_ids
) -> TargetSpec:
    """Describe the target in ``folder``; ``default_ids`` gives its aux layers where settings name none.

    Raises: UserError for an unsupported architecture, weights that are not all there, layer ids beyond
    the depth, head counts that do not divide, an adapter, or a tokenizer of another model.
    """
    config = read_config(folder, settings.trust_remote_code)
    family = family_of(architecture_of(config))
    weights = Weights(folder)
    weights.check_complete()
    tokenizer = read_tokenizer(folder, settings.trust_remote_code)
    return _spec(folder, settings, default_ids, config, family, weights, tokenizer)


def read_outline(
    folder: Path, settings: TargetSettings, default_ids: LayerChoice = default_aux_layer_ids
) -> TargetSpec:
    """Describe a target from its config.json alone, for a plan or a comparison of shapes.

    Fingerprints are ``UNKNOWN``. An architecture that eyas or transformers does not know has an outline too.
    Raises: UserError when config.json cannot be read or lacks what every decoder has.
    """
    config = outline_config(folder, settings)
    family = FAMILIES.get(architecture_of(config), Family(UNKNOWN))
    return _spec(folder, settings, default_ids, config, family, None, None)


def outline_config(folder: Path, settings: TargetSettings) -> Any:
    """Return the configuration that ``read_outline`` reads. Raises: UserError when it cannot be read."""
    try:
        return read_config(folder, settings.trust_remote_code)
    except UserError:
        plain = plain_config(folder)
        if not hasattr(plain.get_text_config(), "num_hidden_layers"):
            raise
        return plain


def architecture_of(config: Any) -> str:
    return str((config.architectures or ["(none named)"])[0])


def as_recorded(spec: TargetSpec, recorded: str, folder: Path) -> TargetSpec:
    """Return ``spec`` with the weights' fingerprint made as ``recorded`` was, so that the two compare.

    eyas 0.1 recorded another one, and so does target.fingerprint=full.
    """
    if recorded.partition("-")[0] == spec.weights_fingerprint.partition("-")[0]:
        return spec
    return replace(spec, weights_fingerprint=fingerprint_as(Weights(folder), recorded))


def _spec(
    folder: Path,
    settings: TargetSettings,
    default_ids: LayerChoice,
    config: Any,
    family: Family,
    weights: Weights | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> TargetSpec:
    text = config.get_text_config()
    try:
        num_layers, heads = text.num_hidden_layers, text.num_attention_heads
        hidden_size, vocab_size = text.hidden_size, text.vocab_size
        if tokenizer is not None:
            check_ids(folder, tokenizer, vocab_size)
        aux, latent = settings.aux_layer_ids, latent_attention(text)
        return TargetSpec(
            model=settings.model,
            revision=settings.revision,
            architecture=architecture_of(config),
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            num_layers=num_layers,
            aux_layer_ids=default_ids(num_layers) if aux is None else check_aux_layer_ids(aux, num_layers),
            dtype=_dtype(folder, config, weights) if settings.dtype == "auto" else settings.dtype,
            norm_kind=family.norm_kind,
            norm_eps=getattr(text, family.norm_eps_key),
            logit_softcap=getattr(text, family.softcap_key) if family.softcap_key else None,
            logit_scale=_logit_scale(text, family),
            tied_head=_is_tied(weights, config, text),
            eos_token_ids=eos_token_ids(folder, tokenizer, text),
            tokenizer_fingerprint=fingerprint_tokenizer(folder) if tokenizer else UNKNOWN,
            template_fingerprint=fingerprint_template(tokenizer.chat_template) if tokenizer else UNKNOWN,
            weights_fingerprint=fingerprint_weights(weights, settings.fingerprint) if weights else UNKNOWN,
            num_attention_heads=heads,
            # Attention over latents reads them through as many key heads as query heads.
            num_key_value_heads=heads if latent else getattr(text, "num_key_value_heads", None) or heads,
            head_dim=_head_dim(text, heads, latent),
            intermediate_size=_mlp_width(text),
            max_position_embeddings=text.max_position_embeddings,
            rope_parameters=dict(text.rope_parameters or {}),
            latent_attention=latent,
        )
    except AttributeError as error:
        raise UserError(
            f"{folder / 'config.json'} has no {error.name}", hint="copy or download the model again"
        ) from None


def _dtype(folder: Path, config: Any, weights: Weights | None) -> str:
    """Return the target's type: a wrapper's, its text model's, or where both are silent the embedding's.

    The order is vLLM's. Raises: UserError for a type that states are not stored in.
    """
    for part in (config, config.get_text_config()):
        if getattr(part, "dtype", None) is not None:
            named = str(part.dtype).removeprefix("torch.")
            break
    else:
        if weights is None:
            return "bfloat16"
        named = _DTYPES.get(weights.entry(f"{weights.prefix}embed_tokens.weight").dtype, "float32")
    if named not in _DTYPES.values():
        raise UserError(
            f"{folder / 'config.json'} names the type {named}, in which states are not computed",
            hint="set target.dtype=bfloat16, float16 or float32, as the engine will compute",
        )
    return named


def _logit_scale(text: Any, family: Family) -> float:
    """Return what the target multiplies its logits by."""
    if family.logit_divisor_key:
        return 1.0 / float(getattr(text, family.logit_divisor_key))
    return float(getattr(text, family.logit_scale_key)) if family.logit_scale_key else 1.0


def _is_tied(weights: Weights | None, config: Any, text: Any) -> bool:
    """Return whether the head is the embedding: existing weights count before what the configuration says.

    Raises: UserError when the configuration says that there is a separate head and none exists.
    """
    says_tied = bool(text.tie_word_embeddings)
    if weights is None:
        return says_tied
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
