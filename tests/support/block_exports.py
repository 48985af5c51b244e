"""Block drafts written as the exporters write them."""

from pathlib import Path
from typing import Any, Literal

import torch
from block_training import Trained

from eyas.drafters.common.block_export import block_tensors
from eyas.drafters.common.block_model import BlockDraft
from eyas.drafters.dflash import export as dflash
from eyas.drafters.dspark import export as dspark
from eyas.drafters.dspark.model import DSparkDraft
from eyas.files import write_json
from eyas.safetensors_io import save_tensors
from eyas.types import TargetSpec, VocabMap


def export_of(draft: BlockDraft) -> Any:
    return dspark if isinstance(draft, DSparkDraft) else dflash


def write_block_draft(
    folder: Path,
    draft: BlockDraft,
    spec: TargetSpec,
    vocab: VocabMap,
    form: Literal["native", "speculators"] = "native",
    **changes: Any,
) -> Path:
    """Write a folder and return it; ``changes`` of config.json make it a wrong one."""
    kind = export_of(draft)
    config = (kind.native_config if form == "native" else kind.speculators_config)(draft.config, spec, vocab)
    folder.mkdir(parents=True)
    save_tensors(
        block_tensors(draft, vocab, getattr(torch, spec.dtype)),
        folder / "model.safetensors",
        {"format": "pt"},
    )
    write_json(folder / "config.json", {k: v for k, v in (config | changes).items() if v is not ...})
    return folder


def write_trained(folder: Path, trained: Trained, form: Literal["native", "speculators"] = "native") -> Path:
    return write_block_draft(folder, trained.draft, trained.spec, trained.vocab, form)
