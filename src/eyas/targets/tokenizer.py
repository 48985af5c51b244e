"""Reads a target's tokenizer, its chat templates as a server chooses them, and the ids that end an answer."""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eyas.errors import UserError
from eyas.files import read_json
from eyas.targets.remote import TEMPLATES

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tiktoken.model")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
# Share of base ids beyond the embedding up to which the tokenizer is still the target's.
_FEW = 0.01


def read_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a target's tokenizer, with the template that a server renders with.

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
    tokenizer.chat_template = _served_template(folder, tokenizer.chat_template)
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer in {folder} has no chat template, so this is not a chat model",
            hint="use the instruct variant, or add the server's template as chat_template.jinja",
        )
    return tokenizer


def check_ids(folder: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Refuse a tokenizer of another model; a few ids beyond the embedding are no reason to.

    Gemma 3's text models lack a row for ``<image_soft_token>``; prepare drops rows with such an id.
    Raises: UserError.
    """
    num_base = len(tokenizer) - len([i for i in tokenizer.added_tokens_decoder if i >= vocab_size])
    if num_base - vocab_size > max(1, int(_FEW * vocab_size)):
        raise UserError(
            f"the tokenizer in {folder} has {len(tokenizer)} ids but the embedding only {vocab_size} rows",
            hint="the tokenizer is another model's, or tokens were added without resizing the embedding",
        )


def eos_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase | None, text: Any) -> tuple[int, ...]:
    """Collect the ids that end an answer, as servers do.

    They stand in generation_config.json, in the configuration of a wrapper, of its text model, and in the
    tokenizer. Raises: UserError when none of them names one, or a file is damaged.
    """
    values = [getattr(text, "eos_token_id", None), _named_eos(folder / "config.json")]
    values.append(_named_eos(folder / "generation_config.json"))
    if tokenizer is not None:
        values.append(tokenizer.eos_token_id)
    ids: set[int] = set()
    for value in values:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    if not ids and tokenizer is None:
        return (0,)  # an outline: nothing is generated with it
    if not ids:
        raise UserError(f"{folder} names no end-of-turn token", hint="add eos_token_id to its config.json")
    return tuple(sorted(ids))


def fingerprint_tokenizer(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in _FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    return digest.hexdigest()[:16]


def fingerprint_template(template: Any) -> str:
    """Identify a template, or several by name in whatever order."""
    text = json.dumps(template, sort_keys=True) if isinstance(template, dict) else str(template)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _served_template(folder: Path, own: Any) -> Any:
    """Return the tokenizer's template, or the processor's where a server takes that one.

    vLLM renders with the processor's, and with the tokenizer's for a request with tools.
    Source: vllm 0.32, renderers/hf.py, resolve_chat_template; transformers 5.19, processing_utils.py.
    """
    processors = _processor_template(folder)
    if not processors or not own:
        return own or processors
    named = own if isinstance(own, dict) else {"default": own}
    has_processor = any((folder / name).is_file() for name in _PROCESSOR_FILES)
    if not has_processor or processors == named.get("default"):
        return own
    with_tools = {"tool_use": named["default"]} if "default" in named else {}
    return {**with_tools, **named, "default": processors}


def _processor_template(folder: Path) -> str | None:
    """Return the template that is a processor's and not the tokenizer's; chat_template.jinja is both's.

    Raises: UserError when its file is damaged.
    """
    for name in ("processor_config.json", "chat_template.json"):  # in the order in which they win
        if template := _json(folder / name).get("chat_template"):
            if not isinstance(template, str):
                raise UserError(
                    f"chat_template in {folder / name} is not text",
                    hint="write the server's template as chat_template.jinja",
                )
            if name == "chat_template.json" and (folder / TEMPLATES).is_dir():
                return None  # transformers refuses the two together, and vLLM takes the tokenizer's
            return template
    return None


def _named_eos(path: Path) -> Any:
    value = _json(path).get("eos_token_id")
    if not all(type(i) is int for i in (value if isinstance(value, list) else [value]) if i is not None):
        raise UserError(f"eos_token_id in {path} is not a token id: {value!r}", hint="write its number")
    return value


def _json(path: Path) -> dict[str, Any]:
    """Return a file's values, none where it is missing. Raises: UserError when it is damaged."""
    if not path.is_file():
        return {}
    try:
        value = read_json(path)
        if not isinstance(value, dict):
            raise ValueError("it holds no settings")
    except ValueError as error:
        raise UserError(f"cannot read {path}: {error}", hint="download or copy the model again") from None
    return value
