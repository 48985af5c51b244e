"""States in eight bits: float8 (4 bits of exponent, 3 of mantissa) with one scale for each token and layer.

A scale shared by layers or tokens would lose the small ones beside massive activations.
"""

import torch

DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(DTYPE).max


def encode(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [..., D] in float8 and the fp32 scales [...] that give the values back."""
    largest = states.abs().amax(-1).float()
    scale = torch.where(largest > 0, largest / _LARGEST, 1.0)
    # Dividing in fp32 rounds once, and clamping keeps the largest value from becoming NaN.
    scaled = (states.float() / scale[..., None]).clamp(-_LARGEST, _LARGEST)
    return scaled.to(DTYPE), scale


def decode(states: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float8 [..., D] times its scales [...] in ``dtype``."""
    return (states.float() * scale[..., None]).to(dtype)
