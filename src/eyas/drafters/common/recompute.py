"""Trading time for memory: a function whose results the backward pass computes again."""

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def again(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function`` and keep only its inputs: the backward pass calls it again."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
