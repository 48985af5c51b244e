"""What engines are told of block drafts, and the numbers of draft tokens at which they would serve others."""

import json
from pathlib import Path

from eyas.drafters.common.block.config import BlockConfig
from eyas.drafters.common.sglang_layers import layers_trouble
from eyas.errors import UserError
from eyas.layer_ids import ReadLayers, to_output_of


def check_block(engine: str, draft: str, num_draft_tokens: int, first_slot: int) -> None:
    """Refuse draft tokens that a block does not hold, or that an engine would draft from another block.

    vLLM and SGLang compute only the slots that they need. To a causal draft that makes no difference; a slot
    of a bidirectional one would miss those behind it. Raises: UserError.

    Source: SGLang 0.5.23's ``dflash_worker_v2.py`` and ``dspark_config.py``, which only log a warning.
    """
    path = Path(draft) / "config.json"
    if not path.is_file():
        return  # not on this machine: a command that is only printed
    config = json.loads(path.read_text(encoding="utf-8"))
    inside = config.get("transformer_layer_config") or config
    held = int(config["block_size"]) - first_slot
    if num_draft_tokens > held:
        raise UserError(
            f"the draft's block holds {held} draft tokens, {num_draft_tokens} were asked for",
            hint=f"ask for {held} at most",
        )
    if num_draft_tokens < held and not inside.get("is_causal"):
        raise UserError(
            f"{engine} would draft {num_draft_tokens} tokens from a shorter block than the "
            f"{held + first_slot} slots that this bidirectional draft was trained on",
            hint=f"ask for {held} draft tokens, or train with draft.causal=true",
        )


def sglang_arguments(algorithm: str, draft: str, num_draft_tokens: int) -> list[str]:
    """Return the words of SGLang's command line. It counts the token that verification starts from, too."""
    return [
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", draft),
        *("--speculative-num-draft-tokens", str(num_draft_tokens + 1)),
    ]


def sglang_trouble(config: BlockConfig, layers: ReadLayers | None) -> str | None:
    """Say why SGLang would not compute this draft as it was trained, or None."""
    if not config.has_full_vocabulary:
        return "SGLang maps no reduced vocabulary of a block draft; train with draft.vocab_size=null"
    return layers_trouble(layers) if layers else None


def check_sglang_layers(layers: ReadLayers) -> None:
    """Raises: UserError for layer 0; the others have ids in SGLang, one less in every class."""
    to_output_of(layers.ids)
