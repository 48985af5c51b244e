"""A DSpark draft as engines load it, and reading it back."""

from pathlib import Path
from typing import Any

from eyas.drafters.common import block_export, block_read
from eyas.drafters.common.block_read import StoredBlockDraft
from eyas.drafters.dspark.config import DSparkConfig
from eyas.drafters.dspark.model import DSparkDraft
from eyas.errors import UserError
from eyas.types import TargetSpec, VocabMap

# ``DSparkDraftModel`` is DeepSeek-V4's own draft to vLLM.
ARCHITECTURE = "Qwen3DSparkModel"


def _heads(config: DSparkConfig) -> dict[str, Any]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        # Absent it means true in native configurations and false in the speculators format.
        "sample_from_anchor": True,
    }


def native_config(config: DSparkConfig, spec: TargetSpec, vocab: VocabMap) -> dict[str, Any]:
    native = block_export.native_config(config, spec, vocab, ARCHITECTURE, _heads(config))
    native["dflash_config"]["sample_from_anchor"] = True
    return native | {"target_layer_ids": native["dflash_config"]["target_layer_ids"]}


def speculators_config(config: DSparkConfig, spec: TargetSpec, vocab: VocabMap) -> dict[str, Any]:
    native = native_config(config, spec, vocab)
    further = {"architectures": [ARCHITECTURE], **_heads(config)}
    return block_export.speculators_config(native, "dspark", config.num_predictions, further)


def read(folder: Path) -> StoredBlockDraft:
    """Read a folder of either format whole.

    Raises: UserError for a folder that is no DSpark draft, is damaged, or of a kind that eyas does not
    compute; ContractError for unknown or missing tensors, as vLLM does.
    """
    config = block_read.read_block_config(folder, "dspark", (ARCHITECTURE,))
    try:
        ids = block_read.aux_layer_ids_of(config)
        shape = DSparkConfig(**block_read.shape_of(config, len(ids)), markov_rank=int(config["markov_rank"]))
        head = config.get("markov_head_type", "vanilla")
        confident = config.get("enable_confidence_head") and config.get("confidence_head_with_markov")
        anchored = config.get("sample_from_anchor", "transformer_layer_config" not in config)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{folder / 'config.json'} describes no draft: {type(error).__name__} {error}",
            hint="export, copy or download it again",
        ) from None
    if head != "vanilla":
        raise UserError(f"the draft in {folder} has a {head} Markov head; eyas computes vanilla ones")
    if not confident:
        raise UserError(f"the draft in {folder} lacks the confidence head that reads hidden state and token")
    if not anchored:
        raise UserError(f"the draft in {folder} predicts nothing from its anchor's slot (sample_from_anchor)")
    return block_read.read_stored(folder, config, DSparkDraft, shape)
