"""A toy as a folder; no engine loads it, only eyas."""

from collections.abc import Mapping
from typing import Any

import torch

from eyas.errors import ContractError, UserError
from eyas.types import TargetSpec, VocabMap
from toy_drafter.config import ToyConfig
from toy_drafter.model import ToyDraft


def tensors(draft: ToyDraft) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in draft.trainable().items()}


def native_config(config: ToyConfig, spec: TargetSpec, vocab: VocabMap) -> dict[str, Any]:
    return {"architectures": ["ToyDraftModel"], "toy": config.to_json(), "layers": list(spec.aux_layer_ids)}


def check_speculators(config: ToyConfig) -> None:
    raise UserError("a toy has no speculators form", hint="set export.format=native")


def speculators_config(native: dict[str, Any]) -> dict[str, Any]:
    raise NotImplementedError


def check_config(config: Mapping[str, Any]) -> None:
    if len(config["layers"]) != config["toy"]["num_aux_layers"]:
        raise ContractError("the toy names another number of layers than it reads")


@torch.no_grad()
def logits(draft: ToyDraft, aux: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = draft(aux.float(), tokens)
    return found
