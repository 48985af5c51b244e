"""Reads DFlash drafts as they are published."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eyas.drafters.common.block import load as block_load
from eyas.drafters.common.stored import StoredDraft
from eyas.drafters.dflash.config import DFlashConfig
from eyas.drafters.dflash.export import ARCHITECTURE
from eyas.drafters.dflash.model import DFlashDraft
from eyas.errors import UserError


def recognises(config: Mapping[str, Any]) -> bool:
    return block_load.is_of_kind(config, "dflash", (ARCHITECTURE,))


def check(folder: Path, config: Mapping[str, Any]) -> None:
    block_load.refuse_others(folder, config)
    if (config.get("dflash_config") or config).get("sample_from_anchor"):
        raise UserError(f"the draft in {folder} predicts from its anchor's slot (sample_from_anchor)")


def read(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> StoredDraft:
    shape = DFlashConfig(**block_load.shape_of(config, len(block_load.aux_layer_ids_of(config))))
    return block_load.read_block_draft(folder, "dflash", shape, DFlashDraft, config, tensors)
