"""Single tensors out of a model folder, by byte range, without loading the model."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from eyas.errors import UserError


def read_tensor(folder: Path, name: str) -> torch.Tensor:
    """Read one tensor of a safetensors model folder, sharded or not.

    Raises: UserError when the tensor or its file is missing or damaged.
    """
    path = folder / _file_of(folder, name)
    if not path.is_file():
        raise UserError(f"{folder} lacks {path.name}, which holds {name}", hint="download the model again")
    try:
        with safe_open(path, framework="pt") as f:
            if name not in f.keys():  # noqa: SIM118 (a safe_open handle is no mapping)
                raise UserError(f"{path} holds no tensor {name}", hint="is this folder the target you meant?")
            return f.get_tensor(name)
    except SafetensorError as error:
        raise UserError(f"{path} is damaged: {error}", hint="download the model again") from None


def read_layer(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Read the floating-point tensors whose names start with ``prefix``, by the rest of their names."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        names = [name for name in weight_map if name.startswith(prefix)]
    else:
        with safe_open(folder / "model.safetensors", framework="pt") as f:
            names = [name for name in f.keys() if name.startswith(prefix)]  # noqa: SIM118
    tensors = {name.removeprefix(prefix): read_tensor(folder, name) for name in sorted(names)}
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


def _file_of(folder: Path, name: str) -> str:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return "model.safetensors"
    weight_map = json.loads(index.read_text())["weight_map"]
    if name not in weight_map:
        raise UserError(f"{index} names no tensor {name}", hint="is this folder the target you meant?")
    return str(weight_map[name])
