"""Which of a target's chat templates a server renders with.

A folder holds up to two: the tokenizer's (chat_template.jinja with additional_chat_templates/, or an entry of
tokenizer_config.json) and the processor's (chat_template.json, or an entry of processor_config.json).
Source: vLLM 0.32, vllm/renderers/hf.py, resolve_chat_template.
"""

from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.files import read_json

Template = str | dict[str, str]

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
ADDITIONAL = "additional_chat_templates"


def served_template(folder: Path, tokenizers: Template | None) -> Template | None:
    """Return the template that the target in ``folder`` is served with; ``tokenizers`` is its tokenizer's.

    vLLM takes a processor's template for requests without tools, and the tokenizer's for requests with tools.
    Raises: UserError when chat_template.json holds no template.
    """
    processors = _processors_template(folder)
    if processors is None or tokenizers is None:
        return tokenizers or processors
    if processors == tokenizers or not _has_processor(folder):
        return tokenizers
    if isinstance(tokenizers, str):
        return {"default": processors, "tool_use": tokenizers}
    with_tools = tokenizers.get("tool_use", tokenizers.get("default", processors))
    return {**tokenizers, "default": processors, "tool_use": with_tools}


def _has_processor(folder: Path) -> bool:
    """Return whether a server finds a processor, and can load it.

    transformers refuses a processor of chat_template.json with additional templates; vLLM then has the tokenizer.
    """
    loads = not ((folder / "chat_template.json").is_file() and any((folder / ADDITIONAL).glob("*.jinja")))
    return loads and any((folder / name).is_file() for name in _PROCESSOR_FILES)


def _processors_template(folder: Path) -> str | None:
    """Return the template that only a processor reads, or None."""
    for name in ("processor_config.json", "chat_template.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            value: Any = read_json(path)
        except ValueError:
            raise UserError(f"{path} is damaged", hint="download or copy the model again") from None
        template = value.get("chat_template") if isinstance(value, dict) else None
        if isinstance(template, str) and template:
            return template
        if name == "chat_template.json":
            raise UserError(
                f"{path} holds no chat_template", hint="download or copy the model again, or remove the file"
            )
    return None
