"""What a draft takes over of its target's shape, where it suits, and what it has instead."""

from collections.abc import Mapping
from typing import Any

from eyas.errors import UserError
from eyas.types import LATENT_KEYS, TargetSpec

# Scalings that transformers (which trains) and the engines (which serve) compute alike, with the keys
# they need. YaRN's mscale and attention_factor are left out on purpose: engines differ in reading them.
_SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
}


def draft_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters of a draft whose target has ``rope``.

    Base and scaling are carried over. A draft rotates its whole head at plain positions, so partial
    and multimodal rotation are not; targets with several kinds of layers give those of full attention.
    A scaling that engines compute differently (dynamic, longrope) becomes none.
    """
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    if nested:
        rope = rope.get("full_attention", nested[0])
    kind = rope.get("rope_type", "default")
    known = kind in _SCALINGS and all(key in rope for key in _SCALINGS[kind][:1])
    kind = kind if known else "default"
    kept = {key: rope[key] for key in _SCALINGS[kind] if rope.get(key) is not None}
    return {"rope_type": kind, "rope_theta": float(rope.get("rope_theta", 10000.0)), **kept}


def latent_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters of a draft with latent attention: plain, or DeepSeek's YaRN.

    There vLLM reads mscale as the trainer does, if both of its values are named; it knows no other scaling.
    """
    kept = draft_rope(rope)
    if kept["rope_type"] != "yarn" or "original_max_position_embeddings" not in kept:
        return {"rope_type": "default", "rope_theta": kept["rope_theta"]}
    kept.pop("truncate", None)
    both = rope.get("mscale") and rope.get("mscale_all_dim")
    mscale, of_all = (rope["mscale"], rope["mscale_all_dim"]) if both else (1.0, 0.0)
    return {**kept, "mscale": float(mscale), "mscale_all_dim": float(of_all)}


def latent_shape(spec: TargetSpec, num_kv_heads: int | None) -> dict[str, int]:
    """Return ranks and head widths as the target has them. Raises: UserError when it lacks one."""
    if spec.latent_attention is None:
        raise UserError(
            f"draft.attention=mla needs a target with latent attention; {spec.architecture} has another",
            hint="leave draft.attention out",
        )
    if num_kv_heads is not None:
        raise UserError(
            f"draft.num_key_value_heads={num_kv_heads} means nothing with draft.attention=mla",
            hint="leave draft.num_key_value_heads out",
        )
    return whole_latent(spec.latent_attention, f"draft.attention=mla would copy {spec.architecture}, which")


def whole_latent(latent: Mapping[str, int | None], who: str) -> dict[str, int]:
    """Return a shape in which nothing is missing. Raises: UserError that begins with ``who``.

    vLLM 0.32 loads no draft without a rank of queries: its loader asks for the fused projection always.
    """
    whole = {key: width for key, width in latent.items() if width is not None}
    if missing := sorted(set(LATENT_KEYS) - set(whole)):
        raise UserError(
            f"{who} has no {missing[0]}, and vLLM serves no draft without it",
            hint="leave draft.attention out: a draft with grouped heads serves any target",
        )
    return whole


def latent_head_dim(latent: Mapping[str, int]) -> int:
    """Return the width of a query's or key's head: the part that turns with positions, and the rest."""
    return latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]


def draft_heads(
    spec: TargetSpec, width: int, num_heads: int | None, num_kv_heads: int | None
) -> tuple[int, int, int]:
    """Return query heads, key/value heads and head width: as asked, as the target's, or sensible ones.

    The target's do not suit when it attends over latents, or when the draft is of another width.
    Raises: UserError when heads do not divide.
    """
    suits = spec.latent_attention is None and width == spec.hidden_size
    if num_heads is None and suits:
        return spec.num_attention_heads, num_kv_heads or spec.num_key_value_heads, spec.head_dim
    heads = num_heads or sensible_heads(width)
    if width % heads:
        raise UserError(
            f"draft.num_attention_heads={heads} does not divide the draft's width {width}",
            hint="leave it out for heads that do",
        )
    if num_kv_heads is None:
        own = spec.num_key_value_heads
        num_kv_heads = own if suits and heads % own == 0 else largest_divisor(heads, 8)
    return heads, num_kv_heads, width // heads


def sensible_heads(width: int) -> int:
    """Return the number of heads of 128, or else the widest that kernels take."""
    for head_dim in (128, 64, 32):
        if width % head_dim == 0:
            return width // head_dim
    raise UserError(
        f"a draft of width {width} does not divide into heads of 128, 64 or 32",
        hint="set draft.hidden_size to a multiple of 128, or draft.num_attention_heads",
    )


def largest_divisor(number: int, at_most: int) -> int:
    return next(d for d in range(at_most, 0, -1) if number % d == 0)
