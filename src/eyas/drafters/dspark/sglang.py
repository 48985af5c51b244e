"""How SGLang is told to serve a DSpark draft, and which ones it would compute otherwise."""

from collections.abc import Sequence

from eyas.drafters.common.block.config import BlockConfig
from eyas.drafters.common.block.serving import sglang_arguments
from eyas.layer_ids import to_sglang


def arguments(draft: str, num_draft_tokens: int) -> list[str]:
    return sglang_arguments("DSPARK", draft, num_draft_tokens)


def trouble(config: BlockConfig) -> str | None:
    if not config.has_full_vocabulary:
        return "SGLang maps no reduced vocabulary of a block draft; train with draft.vocab_size=null"
    return None


def check_layers(aux_layer_ids: Sequence[int]) -> None:
    to_sglang(aux_layer_ids)
