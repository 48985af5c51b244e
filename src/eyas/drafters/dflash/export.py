"""A DFlash draft as engines load it: names of tensors, and config.json of each format."""

from collections.abc import Mapping
from typing import Any

import torch

from eyas.drafters.common.block import export as block_export
from eyas.drafters.dflash.config import DFlashConfig
from eyas.drafters.dflash.model import DFlashDraft
from eyas.types import TargetSpec, VocabMap

ARCHITECTURE = "DFlashDraftModel"


def tensors(draft: DFlashDraft) -> dict[str, torch.Tensor]:
    return block_export.block_tensors(draft)


def native_config(config: DFlashConfig, spec: TargetSpec, vocab: VocabMap) -> dict[str, Any]:
    native = block_export.native_config(config, spec, vocab, ARCHITECTURE, {"sample_from_anchor": False})
    # vLLM from 0.31 on looks for it here, and refuses a DFlash draft in which it is true.
    native["dflash_config"]["sample_from_anchor"] = False
    return native


def check_speculators(config: DFlashConfig) -> None:
    """Every DFlash draft has a speculators form."""


def speculators_config(native: dict[str, Any]) -> dict[str, Any]:
    further = {"architectures": [ARCHITECTURE], "sample_from_anchor": False}
    return block_export.speculators_config(native, "dflash", native["block_size"] - 1, further)


def check_config(config: Mapping[str, Any]) -> None:
    block_export.check_config(config)


def logits(draft: DFlashDraft, aux: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return what the target's head would read, for it is no part of an export."""
    return block_export.block_states(draft, aux, tokens)
