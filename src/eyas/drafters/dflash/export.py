"""A DFlash draft as engines load it, and reading it back."""

from pathlib import Path
from typing import Any

from eyas.drafters.common import block_export, block_read
from eyas.drafters.common.block_read import StoredBlockDraft
from eyas.drafters.dflash.config import DFlashConfig
from eyas.drafters.dflash.model import DFlashDraft
from eyas.errors import UserError
from eyas.types import TargetSpec, VocabMap

ARCHITECTURE = "DFlashDraftModel"


def native_config(config: DFlashConfig, spec: TargetSpec, vocab: VocabMap) -> dict[str, Any]:
    native = block_export.native_config(config, spec, vocab, ARCHITECTURE, {"sample_from_anchor": False})
    # vLLM from 0.31 on looks for it here, and refuses a DFlash draft in which it is true.
    native["dflash_config"]["sample_from_anchor"] = False
    return native


def speculators_config(config: DFlashConfig, spec: TargetSpec, vocab: VocabMap) -> dict[str, Any]:
    further = {"architectures": [ARCHITECTURE], "sample_from_anchor": False}
    native = native_config(config, spec, vocab)
    return block_export.speculators_config(native, "dflash", config.num_predictions, further)


def read(folder: Path) -> StoredBlockDraft:
    """Read a folder of either format whole.

    Raises: UserError for a folder that is no DFlash draft, is damaged, or of a kind that eyas does not
    compute; ContractError for unknown or missing tensors, as vLLM does.
    """
    config = block_read.read_block_config(folder, "dflash", (ARCHITECTURE,))
    try:
        ids = block_read.aux_layer_ids_of(config)
        shape = DFlashConfig(**block_read.shape_of(config, len(ids)))
        anchored = (config.get("dflash_config") or config).get("sample_from_anchor", False)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{folder / 'config.json'} describes no draft: {type(error).__name__} {error}",
            hint="export, copy or download it again",
        ) from None
    if anchored:
        raise UserError(f"the draft in {folder} predicts from its anchor's slot (sample_from_anchor)")
    return block_read.read_stored(folder, config, DFlashDraft, shape)
