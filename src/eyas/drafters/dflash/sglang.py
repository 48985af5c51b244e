"""How SGLang is told to serve a DFlash draft, and which ones it would compute otherwise."""

from eyas.drafters.common.block.serving import (
    check_block,
    check_sglang_layers,
    sglang_arguments,
    sglang_trouble,
)
from eyas.layer_ids import ReadLayers

trouble, check_layers = sglang_trouble, check_sglang_layers


def arguments(draft: str, num_draft_tokens: int) -> list[str]:
    return sglang_arguments("DFLASH", draft, num_draft_tokens)


def check_num_draft_tokens(draft: str, num_draft_tokens: int) -> None:
    check_block("SGLang", draft, num_draft_tokens, first_slot=1)


def oldest(layers: ReadLayers) -> str:
    return "0.5.12"  # the oldest that was read and has DFLASH
