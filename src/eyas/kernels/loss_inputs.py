"""What the loss kernel and its plain twin are given; imports no Triton."""

from dataclasses import dataclass
from typing import Literal

import torch

LossKind = Literal["kl", "lk", "hybrid"]

# How fast the hybrid loss turns from KL to overlap as overlap grows; the paper's best setting.
HYBRID_DECAY = 3.0


@dataclass(frozen=True)
class TeacherTargets:
    """Shapes: probabilities [R, W] (renormalised on the draft vocabulary); mass [R] fp32 (their sum, 1 but
    for rounding) and negative_entropy [R] fp32 (their sum of p log p, in nats); argmax [R] (over all V);
    in_draft [R] (whether the draft vocabulary holds the argmax)."""

    probabilities: torch.Tensor
    mass: torch.Tensor
    negative_entropy: torch.Tensor
    argmax: torch.Tensor
    in_draft: torch.Tensor
