"""The teacher: the target's final norm and head, applied to stored last hidden states."""

from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.errors import ContractError
from eyas.targets.families import family_of
from eyas.targets.weights import read_tensor
from eyas.types import NormKind, TargetSpec


@dataclass(frozen=True)
class TeacherHead:
    """Turns the residual stream before the final norm into the target's own logits.

    Shapes: norm_weight [D], head [V, D], embedding [V, D].
    """

    norm_weight: torch.Tensor
    head: torch.Tensor
    embedding: torch.Tensor
    norm_kind: NormKind
    norm_eps: float
    logit_softcap: float | None
    logit_scale: float

    def normed(self, last: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to [R, D], in fp32 inside as the targets do."""
        if self.norm_kind not in ("rms", "rms_one_plus"):
            raise NotImplementedError(self.norm_kind)
        x = last.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.norm_eps)
        if self.norm_kind == "rms_one_plus":
            return (x * (1.0 + self.norm_weight.float())).to(last.dtype)
        return self.norm_weight * x.to(last.dtype)

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Return the logits [R, V] of the token after each row of ``last`` [R, D]."""
        logits = self.normed(last) @ self.head.T
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "TeacherHead":
        """Return a copy on ``device`` in ``dtype``; a tied head stays one tensor."""
        embedding = self.embedding.to(device, dtype)
        head = embedding if self.head is self.embedding else self.head.to(device, dtype)
        return TeacherHead(
            self.norm_weight.to(device, dtype),
            head,
            embedding,
            self.norm_kind,
            self.norm_eps,
            self.logit_softcap,
            self.logit_scale,
        )


def read_teacher(folder: Path, spec: TargetSpec) -> TeacherHead:
    """Read the three tensors of the teacher from the target's folder, and nothing else of it.

    Raises: UserError when a tensor is missing; ContractError when its shape is not the target's.
    """
    family = family_of(spec.architecture)
    embedding = read_tensor(folder, family.embedding)
    head = embedding if spec.tied_head else read_tensor(folder, family.head)
    norm_weight = read_tensor(folder, family.final_norm)
    for name, tensor in (("embedding", embedding), ("head", head)):
        if tensor.shape != (spec.vocab_size, spec.hidden_size):
            raise ContractError(
                f"the target's {name} is {tuple(tensor.shape)}, its configuration says "
                f"{(spec.vocab_size, spec.hidden_size)}",
                hint="the model folder is damaged or mixed from two models",
            )
    return TeacherHead(
        norm_weight,
        head,
        embedding,
        spec.norm_kind,
        spec.norm_eps,
        spec.logit_softcap,
        spec.logit_scale,
    )
