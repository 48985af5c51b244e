"""Tensor files: safetensors and nothing else, with the errors of the disk as what they are."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


def write_tensors(
    tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file. Raises: OSError when the disk refuses, as of any other file."""
    try:
        save_file(dict(tensors), path, dict(metadata) if metadata else None)
    except SafetensorError as error:
        # Tensors that cannot be written are our mistake and raise ValueError; what is left is the disk.
        raise OSError(f"cannot write {path}: {error}") from None
