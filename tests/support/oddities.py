"""What published target folders hold beside the plain case, each made from a tiny one.

docs/reference/targets.md is made from this table and from what benchmarks/oddities_in_engines.py saw; the
test tests/contract/test_one_reader.py holds each row to what transformers' and vLLM's own readers say.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tiny import CHAT_TEMPLATE

CONFIG = "config.json"
# A template of the processor that renders other text than the tokenizer's.
PROCESSOR_TEMPLATE = "{{ '<|im_start|>' }}" + CHAT_TEMPLATE


@dataclass(frozen=True)
class Oddity:
    """``family`` is the row of TINY that is tried in full; ``wrapped``: only wrappers can have it.

    ``reads`` is what eyas takes it for, as the page says it.
    """

    what: str
    seen: str
    reads: str
    change: Callable[[Path], None]
    family: str = "llama"
    wrapped: bool = False
    refused: str | None = None  # what the error says


def edit(folder: Path, name: str = CONFIG, **changes: Any) -> None:
    """Change top-level values of a JSON file; None removes one."""
    path = folder / name
    values = json.loads(path.read_text()) if path.is_file() else {}
    values |= changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def edit_text(folder: Path, **changes: Any) -> None:
    """Change values of the text model's configuration, wherever it stands."""
    config = json.loads((folder / CONFIG).read_text())
    if "text_config" not in config:
        edit(folder, **changes)
        return
    text = config["text_config"] | changes
    edit(folder, text_config={k: v for k, v in text.items() if v is not None})


def dtype_at(folder: Path, *, top: str | None, text: str | None, key: str = "dtype") -> None:
    for editing, value in ((edit_text, text), (edit, top)):
        editing(folder, dtype=None, torch_dtype=None)
        editing(folder, **{key: value})


def in_bfloat16(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def without_head(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = {n: t.clone() for n, t in load_file(path).items() if not n.endswith("lm_head.weight")}
    save_file(tensors, path, metadata={"format": "pt"})


def head_twice(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = {n: t.clone() for n, t in load_file(path).items()}
    embedding = next(n for n in tensors if n.endswith("embed_tokens.weight"))
    head = next((n for n in tensors if n.endswith("lm_head.weight")), "lm_head.weight")
    save_file(tensors | {head: tensors[embedding].clone()}, path, metadata={"format": "pt"})
    edit(folder, tie_word_embeddings=True)
    edit_text(folder, tie_word_embeddings=True)


def one_id_more(folder: Path) -> None:
    """Add a token that the embedding has no row for, as Gemma 3's text models have."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<image_soft_token>"], special_tokens=True)
    tokenizer.save_pretrained(folder)


def tied_in_text_only(folder: Path) -> None:
    without_head(folder)
    edit(folder, tie_word_embeddings=False)
    edit_text(folder, tie_word_embeddings=True)


def template_of_processor(folder: Path, *, tokenizers: bool) -> None:
    """Move the template to the processor's file; ``tokenizers``: the tokenizer keeps one as well."""
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    edit(folder, "chat_template.json", chat_template=PROCESSOR_TEMPLATE if tokenizers else template)
    if tokenizers:
        edit(folder, "tokenizer_config.json", chat_template=template)
    # A processor that needs no torchvision, so that every environment can load it.
    edit(folder, "preprocessor_config.json", processor_class="Qwen2AudioProcessor",
         feature_extractor_type="WhisperFeatureExtractor")  # fmt: skip


def named_templates(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}" + CHAT_TEMPLATE)


def ends_in_generation_config(folder: Path) -> None:
    edit(folder, "generation_config.json", eos_token_id=[1, 7])


def adapter_beside(folder: Path) -> None:
    edit(folder, "adapter_config.json", base_model_name_or_path="meta-llama/Llama-3.1-8B", peft_type="LORA")


ODDITIES: dict[str, Oddity] = {
    "dtype at the top": Oddity(
        "a wrapper whose config.json names its type (`torch_dtype`) at the top only",
        "gemma-3-4b-it",
        "that type",
        lambda f: dtype_at(f, top="bfloat16", text=None, key="torch_dtype"),
        "gemma3-wrapped",
        wrapped=True,
    ),
    "dtype in text_config": Oddity(
        "a wrapper whose config.json names its type in `text_config` only",
        "early Llama 4 conversions",
        "that type",
        lambda f: dtype_at(f, top=None, text="bfloat16"),
        "gemma3-wrapped",
        wrapped=True,
    ),
    "dtype nowhere": Oddity(
        "no type in config.json",
        "conversions by hand",
        "the embedding's type",
        lambda f: (dtype_at(f, top=None, text=None), in_bfloat16(f)),
    ),
    "one id more": Oddity(
        "a tokenizer with one id more than the embedding has rows",
        "gemma-3-1b-it, gemma-3-270m-it",
        "as it is; prepare drops a row with such an id (`token_id_out_of_range`)",
        one_id_more,
        "gemma3",
    ),
    "tied in text_config": Oddity(
        "a wrapper that ties its head in `text_config` only, without a head in its weights",
        "fine-tunes of wrappers",
        "tied",
        tied_in_text_only,
        "gemma3-wrapped",
        wrapped=True,
    ),
    "head twice": Oddity(
        "a tied model that stores its head a second time",
        "fine-tunes of tied models",
        "tied; another head than the embedding is refused",
        head_twice,
        "llama-tied",
    ),
    "template of the processor": Oddity(
        "a template in `chat_template.json` only",
        "Mistral-Small-3.1-24B-Instruct-2503",
        "that template",
        lambda f: template_of_processor(f, tokenizers=False),
    ),
    "two templates": Oddity(
        "a processor and a tokenizer with different templates",
        "gemma-3, Qwen2.5-VL (by age of the files)",
        "the processor's; the tokenizer's for rows with tools, as vLLM does",
        lambda f: template_of_processor(f, tokenizers=True),
    ),
    "named templates": Oddity(
        "`additional_chat_templates/`",
        "Hermes-3, c4ai-command-r",
        "`tool_use` for rows with tools, else `default`",
        named_templates,
    ),
    "ends in generation_config": Oddity(
        "further ends of an answer in `generation_config.json`",
        "Llama-3.1-8B-Instruct, gemma-3-4b-it",
        "all ends that any file names",
        ends_in_generation_config,
    ),
    "adapter": Oddity(
        "`adapter_config.json`, alone or next to other files",
        "any LoRA",
        "refused: an adapter of BASE, merge it first",
        adapter_beside,
        refused="is an adapter of meta-llama/Llama-3.1-8B",
    ),
}
