"""How SGLang is told to serve a DSpark draft, and which ones it would compute otherwise."""

from eyas.drafters.common.block.serving import (
    check_block,
    check_sglang_layers,
    sglang_arguments,
    sglang_trouble,
)
from eyas.layer_ids import ReadLayers

trouble, check_layers = sglang_trouble, check_sglang_layers


def arguments(draft: str, num_draft_tokens: int) -> list[str]:
    words = sglang_arguments("DSPARK", draft, num_draft_tokens)
    # Else it drafts as many tokens as config.json's block has, and does not start when asked for others.
    return [*words, "--speculative-dspark-block-size", str(num_draft_tokens)]


def check_num_draft_tokens(draft: str, num_draft_tokens: int) -> None:
    check_block("SGLang", draft, num_draft_tokens, first_slot=0)


def oldest(layers: ReadLayers) -> str:
    return "0.5.23"  # the oldest that was read and has DSPARK
