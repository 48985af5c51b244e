"""How SGLang is told to serve a DSpark draft, and which ones it would compute otherwise."""

from eyas.drafters.common.block.serving import sglang_arguments, sglang_trouble
from eyas.layer_ids import to_sglang

trouble, check_layers = sglang_trouble, to_sglang


def arguments(draft: str, num_draft_tokens: int) -> list[str]:
    return sglang_arguments("DSPARK", draft, num_draft_tokens)
