"""AdamW in fp32 with warm-up and cosine decay."""

import math

import torch

from eyas.config.schema import TrainSettings
from eyas.draft.eagle3 import Eagle3Draft


def make_optimizer(draft: Eagle3Draft, settings: TrainSettings) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters; only matrices decay."""
    trainable = draft.trainable()
    assert all(p.dtype == torch.float32 for p in trainable.values()), "master weights are fp32"
    matrices = [p for p in trainable.values() if p.ndim == 2]
    vectors = [p for p in trainable.values() if p.ndim != 2]
    assert len(matrices) + len(vectors) == len(trainable)
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)


def learning_rate(step: int, num_steps: int, settings: TrainSettings) -> float:
    """Return the rate of step 0, 1, ...: linear warm-up, then half a cosine down to a twentieth."""
    warmup = max(1, round(settings.warmup_share * num_steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    floor = 0.05
    return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
