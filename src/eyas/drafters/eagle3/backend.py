"""Which path trains a draft, and in which dtype: the GPU's kernels where they fit, plain torch elsewhere."""

import torch

from eyas.config.schema import TrainSettings
from eyas.drafters.eagle3.fused.unroll import FusedUnroll
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.progress import say


def compute_dtype(settings: TrainSettings, device: torch.device) -> torch.dtype:
    """Return the type of matrix multiplications; masters, moments and gradient sums stay fp32."""
    if settings.compute_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, settings.compute_dtype)
    return dtype


def fused_unroll(
    draft: Eagle3Draft, dtype: torch.dtype, device: torch.device, settings: TrainSettings, sliced: bool
) -> FusedUnroll | None:
    """Return the fast path where it runs: on a GPU whose kernels fit the draft."""
    if draft.config.latent_attention is not None:
        say("train: a draft with latent attention takes the plain path")
    elif draft.config.num_layers > 1:
        layers = draft.config.num_layers
        say(
            f"train: a draft of {layers} layers takes the plain path; every row runs all of them but the last"
        )
    elif device.type == "cuda" and not FusedUnroll.fits(draft):
        say("train: the GPU kernels do not fit the draft's shape; the plain path trains it, slower")
    elif device.type == "cuda":
        return FusedUnroll(draft, dtype, settings.train_head, settings.recompute, sliced)
    return None
