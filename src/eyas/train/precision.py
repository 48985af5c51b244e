"""In which type matrices are multiplied."""

import torch

from eyas.config.schema import TrainSettings


def compute_dtype(settings: TrainSettings, device: torch.device) -> torch.dtype:
    """Return the type of matrix multiplications; masters, moments and gradient sums stay fp32."""
    if settings.compute_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, settings.compute_dtype)
    return dtype
