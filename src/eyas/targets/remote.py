"""A target that lies on a hub or in a bucket: what describes it is fetched, its weights stay there.

Preparing, training and exporting need the description and three tensors; only an engine needs the rest.
"""

import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.files import atomic_folder, fingerprint, write_json
from eyas.targets.adapter import ADAPTER_CONFIG, refuse_adapter
from eyas.targets.files import ELSEWHERE, open_url, unreachable

# What describes a target: all files of these kinds, but for those that list its weights.
DESCRIBING = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py")
_WEIGHTS_INDEX = "*.index.json"
TEMPLATES = "additional_chat_templates"
# What is asked for where a plain web server lists nothing.
_NAMES = (
    "config.json",
    ADAPTER_CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    f"{TEMPLATES}/default.jinja",
    f"{TEMPLATES}/rag.jinja",
    f"{TEMPLATES}/tool_use.jinja",
)


def cache_folder() -> Path:
    """Return where eyas keeps targets it has made or described."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "eyas" / "targets"


def describe_url(url: str) -> Path:
    """Return a folder with the description of the target at an fsspec URL, and where its weights lie.

    It is fetched anew each time, for what lies there may change.
    Raises: UserError when nothing can be read there.
    """
    url = url.rstrip("/")
    fs, root = open_url(url)
    folder = cache_folder() / f"at-{fingerprint(url)}"
    try:
        with atomic_folder(folder) as beside:
            for name in _describing(fs, root):
                path = beside / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(fs.cat_file(f"{root.rstrip('/')}/{name}"))
            refuse_adapter(beside, url)
            if not (beside / "config.json").is_file():
                raise UserError(
                    f"{url} has no config.json", hint="set target.model to a model folder's address"
                )
            write_json(beside / ELSEWHERE, {"url": url})
    except unreachable() as error:
        raise UserError(
            f"cannot read {url} ({type(error).__name__})",
            hint="check the address, the network and your credentials",
        ) from None
    return folder


def _describing(fs: Any, root: str) -> list[str]:
    """Return the names of the files that describe the target at ``root``."""
    root = root.rstrip("/")
    listed = _listed(fs, root)
    if not listed:
        return [name for name in _NAMES if fs.exists(f"{root}/{name}")]
    names = [
        name
        for name in listed
        if any(fnmatch(name, kind) for kind in DESCRIBING) and not fnmatch(name, _WEIGHTS_INDEX)
    ]
    templates = _listed(fs, f"{root}/{TEMPLATES}") if TEMPLATES in listed else []
    return names + [f"{TEMPLATES}/{name}" for name in templates if name.endswith(".jinja")]


def _listed(fs: Any, path: str) -> list[str]:
    try:
        return sorted(str(p).rstrip("/").rpartition("/")[2] for p in fs.ls(path, detail=False))
    except unreachable(NotImplementedError):
        return []


def describe_hub(model: str, revision: str | None) -> Path:
    """Return a folder as ``describe_url`` does, for a hub id; pinned to the commit it was read at.

    Raises: UserError when it cannot be fetched.
    """
    from huggingface_hub import HfApi

    try:
        commit = HfApi().model_info(model, revision=revision).sha
    except unreachable() as error:
        raise unfetched(model, error) from None
    return describe_url(f"hf://{model}@{commit}")


def unfetched(model: str, error: Exception) -> UserError:
    """Return the error of a target that is neither here nor on a hub that answers."""
    return UserError(
        f"the target {model} is neither a local folder nor a hub model that can be fetched"
        f" ({type(error).__name__})",
        hint="check the spelling, the network, and hf auth login for gated models",
    )
