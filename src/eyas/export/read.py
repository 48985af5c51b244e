"""Reads a draft's folder, of any kind and format that eyas knows."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eyas import registry
from eyas.drafters.common.stored import StoredDraft
from eyas.errors import ContractError, UserError
from eyas.files import read_json

_AGAIN = "export, copy or download it again"


def read_draft(folder: Path) -> StoredDraft:
    """Read a folder whole.

    Raises: UserError for a folder that is no draft, is damaged, or of a kind that eyas does not compute;
    ContractError for unknown or missing tensors, as vLLM does.
    """
    config = read_config(folder)
    load = registry.drafter_file(kind_of(folder, config), "load")
    load.check(folder, config)
    try:
        stored: StoredDraft = load.read(folder, config, _read_tensors(folder))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        said = " ".join(str(error).split())
        raise UserError(
            f"{folder / 'config.json'} describes no draft: {type(error).__name__} {said}", hint=_AGAIN
        ) from None
    return stored


def read_config(folder: Path) -> dict[str, Any]:
    """Read a draft's config.json. Raises: UserError when it is missing or damaged."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no draft: it has no config.json", hint="name what eyas export wrote")
    try:
        config: dict[str, Any] = read_json(path)
        list(config.get("architectures") or ())
        dict(config.get("transformer_layer_config") or {})
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} is damaged", hint=_AGAIN) from None
    return config


def kind_of(folder: Path, config: dict[str, Any]) -> str:
    """Return the kind of draft that a config.json describes. Raises: UserError for an unknown one."""
    kinds = registry.drafters()
    for name in kinds:
        if registry.drafter_file(name, "load").recognises(config):
            return name
    named = ", ".join(str(name) for name in config.get("architectures") or ()) or "no kind"
    raise UserError(
        f"{folder} is no draft that eyas knows: its config.json names {named}",
        hint=f"kinds that it reads: {', '.join(sorted(kinds))}",
    )


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no *.safetensors weights", hint="copy or download the draft again")
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (a safe_open handle is no mapping)
                    if name in tensors:
                        raise ContractError(f"{folder} holds {name} twice")
                    tensors[name] = file.get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{path} is damaged: {error}", hint=_AGAIN) from None
    return tensors
