"""A DSpark draft as engines load it: names of tensors, and config.json of each format."""

from collections.abc import Mapping
from typing import Any

import torch

from eyas.drafters.common.block import export as block_export
from eyas.drafters.dspark.config import DSparkConfig
from eyas.drafters.dspark.model import DSparkDraft
from eyas.types import TargetSpec, VocabMap

# ``DSparkDraftModel`` is DeepSeek-V4's own draft to vLLM.
ARCHITECTURE = "Qwen3DSparkModel"
_HEADS = {
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    # Absent it means true in native configurations and false in the speculators format.
    "sample_from_anchor": True,
}


def tensors(draft: DSparkDraft) -> dict[str, torch.Tensor]:
    return block_export.block_tensors(draft)


def native_config(config: DSparkConfig, spec: TargetSpec, vocab: VocabMap) -> dict[str, Any]:
    further = {**_HEADS, "markov_rank": config.markov_rank}
    native = block_export.native_config(config, spec, vocab, ARCHITECTURE, further)
    native["dflash_config"]["sample_from_anchor"] = True
    return native | {"target_layer_ids": native["dflash_config"]["target_layer_ids"]}


def check_speculators(config: DSparkConfig) -> None:
    """Every DSpark draft has a speculators form."""


def speculators_config(native: dict[str, Any]) -> dict[str, Any]:
    further = {"architectures": [ARCHITECTURE], **_HEADS, "markov_rank": native["markov_rank"]}
    return block_export.speculators_config(native, "dspark", native["block_size"], further)


def check_config(config: Mapping[str, Any]) -> None:
    block_export.check_config(config)


@torch.no_grad()
def logits(draft: DSparkDraft, aux: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return what the target's head would read, and what the two further heads make of it."""
    hidden = block_export.block_states(draft, aux, tokens)
    before = tokens[-1:].to(hidden.device).expand(len(hidden))
    transition = draft.transition(before)
    bias = draft.markov_head.markov_w2(transition)
    return torch.cat([hidden, bias, draft.confidence(hidden, transition)[:, None]], dim=-1)
