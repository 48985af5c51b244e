"""A target that lies on a hub or in a bucket: what describes it is fetched, its weights stay there.

Preparing, training and exporting need the description and three tensors; only an engine needs the rest.
"""

import os
from pathlib import Path

from eyas.errors import UserError
from eyas.files import atomic_folder, fingerprint, write_json
from eyas.targets.files import ELSEWHERE, open_url, unreachable

# What describes a target and is not listed by a plain web server.
_NAMES = (
    "config.json",
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
        listed = [str(p).rstrip("/").rpartition("/")[2] for p in fs.ls(root, detail=False)]
    except unreachable(NotImplementedError):
        listed = []
    code = [name for name in listed if name.endswith(".py")]
    try:
        with atomic_folder(folder) as beside:
            for name in (*_NAMES, *code):
                path = f"{root.rstrip('/')}/{name}"
                if name in listed or (not listed and fs.exists(path)):
                    (beside / name).write_bytes(fs.cat_file(path))
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
