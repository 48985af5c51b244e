"""Reads a TargetSpec and a tokenizer from a model folder; no weights are loaded."""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from eyas.config.schema import TargetSettings
from eyas.errors import UserError
from eyas.layer_ids import check_aux_layer_ids, default_aux_layer_ids
from eyas.targets.families import family_of
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
            f"{folder} has no tokenizer that loads: {str(error).splitlines()[0]}",
            hint="a target folder needs tokenizer.json (or its tokenizer's own files)",
        ) from None
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer in {folder} has no chat template, so this is not a chat model",
            hint="use the instruct variant, or add the server's template as chat_template.jinja",
        )
    return tokenizer


def read_target(folder: Path, settings: TargetSettings) -> TargetSpec:
    """Describe the target in ``folder``.

    Raises: UserError for an unsupported architecture, layer ids beyond the depth, head counts that
    do not divide, or a tokenizer with more ids than the embedding has rows.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"cannot read {folder / 'config.json'}: {str(error).splitlines()[0]}",
            hint="the model folder is damaged; download or copy it again",
        ) from None
    architecture = (config.architectures or ["(none named)"])[0]
    family = family_of(architecture)
    text = config.get_text_config()
    tokenizer = read_tokenizer(folder, settings.trust_remote_code)
    if len(tokenizer) > text.vocab_size:
        raise UserError(
            f"the tokenizer in {folder} has {len(tokenizer)} ids "
            f"but the embedding only {text.vocab_size} rows",
            hint="the tokenizer is another model's, or tokens were added without resizing the embedding",
        )
    num_layers = text.num_hidden_layers
    aux = settings.aux_layer_ids
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or _head_dim(text.hidden_size, heads)
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
        aux_layer_ids=default_aux_layer_ids(num_layers)
        if aux is None
        else check_aux_layer_ids(aux, num_layers),
        dtype=dtype,
        norm_kind=family.norm_kind,
        norm_eps=getattr(text, family.norm_eps_key),
        logit_softcap=getattr(text, family.softcap_key) if family.softcap_key else None,
        logit_scale=getattr(text, family.logit_scale_key) if family.logit_scale_key else 1.0,
        tied_head=bool(text.tie_word_embeddings),
        eos_token_ids=_eos_token_ids(folder, tokenizer, text.eos_token_id),
        tokenizer_fingerprint=_fingerprint_files(folder, _TOKENIZER_FILES),
        template_fingerprint=hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16],
        weights_fingerprint=_fingerprint_weights(folder),
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        intermediate_size=text.intermediate_size,
        max_position_embeddings=text.max_position_embeddings,
        rope_parameters=dict(text.rope_parameters),
    )


def _head_dim(hidden_size: int, heads: int) -> int:
    if hidden_size % heads:
        raise UserError(
            f"hidden size {hidden_size} does not divide into {heads} attention heads",
            hint="check num_attention_heads in the target's config.json",
        )
    return hidden_size // heads


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


def _fingerprint_weights(folder: Path) -> str:
    """Identify the weights by the size, the first and the last 64 KiB of each file.

    The first bytes of a safetensors file list its tensors; fine-tunes of one model differ in the last.
    """
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{folder} holds no *.safetensors weights",
            hint="convert or download the model in safetensors format",
        )
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as f:
            digest.update(f"{path.name}\0{size}\0".encode() + f.read(1 << 16))
            f.seek(max(0, size - (1 << 16)))
            digest.update(f.read())
    return digest.hexdigest()[:16]
