"""Reads DSpark drafts as they are published."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eyas.drafters.common.block import load as block_load
from eyas.drafters.common.stored import StoredDraft
from eyas.drafters.dspark.config import DSparkConfig
from eyas.drafters.dspark.export import ARCHITECTURE
from eyas.drafters.dspark.model import DSparkDraft
from eyas.errors import UserError


def recognises(config: Mapping[str, Any]) -> bool:
    return block_load.is_of_kind(config, "dspark", (ARCHITECTURE,))


def check(folder: Path, config: Mapping[str, Any]) -> None:
    block_load.refuse_others(folder, config)
    head = config.get("markov_head_type", "vanilla")
    if head != "vanilla":
        raise UserError(f"the draft in {folder} has a {head} Markov head; eyas computes vanilla ones")
    if not (config.get("enable_confidence_head") and config.get("confidence_head_with_markov")):
        raise UserError(f"the draft in {folder} lacks the confidence head that reads hidden state and token")
    # Absent it means true natively and false in the speculators format.
    if not config.get("sample_from_anchor", "transformer_layer_config" not in config):
        raise UserError(f"the draft in {folder} predicts nothing from its anchor's slot (sample_from_anchor)")


def read(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> StoredDraft:
    shape = block_load.shape_of(config, len(block_load.aux_layer_ids_of(config)))
    whole = DSparkConfig(**shape, markov_rank=int(config["markov_rank"]))
    return block_load.read_block_draft(folder, "dspark", whole, DSparkDraft, config, tensors)
