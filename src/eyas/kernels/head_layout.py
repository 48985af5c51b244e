"""How attention heads are grouped."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """``group`` query heads share each of ``kv_heads`` key/value heads."""

    kv_heads: int
    group: int
    head_dim: int
