"""The teacher: the target's final norm and head, applied to stored last hidden states."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from eyas.errors import ContractError
from eyas.targets.architectures import family_of
from eyas.targets.quantized import PLAIN, read_weight
from eyas.targets.weights import Weights
from eyas.types import NormKind, TargetSpec


@dataclass(frozen=True)
class TeacherHead:
    """Turns the residual stream before the final norm into the target's own logits.

    Shapes: norm_weight [D], head [V, D], embedding [V, D], norm_bias [D], head_bias [V].
    """

    norm_weight: torch.Tensor
    head: torch.Tensor
    embedding: torch.Tensor
    norm_kind: NormKind
    norm_eps: float
    logit_softcap: float | None
    logit_scale: float
    norm_bias: torch.Tensor | None = None
    head_bias: torch.Tensor | None = None

    def normed(self, last: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to [R, D], in fp32 inside as the targets do."""
        if self.norm_kind == "layer":
            return F.layer_norm(last, (last.shape[-1],), self.norm_weight, self.norm_bias, self.norm_eps)
        x = last.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.norm_eps)
        if self.norm_kind == "rms_one_plus":
            return (x * (1.0 + self.norm_weight.float())).to(last.dtype)
        return self.norm_weight * x.to(last.dtype)

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Return the logits [R, V] of the token after each row of ``last`` [R, D]."""
        logits = F.linear(self.normed(last), self.head, self.head_bias)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "TeacherHead":
        """Return a copy on ``device`` in ``dtype``; a tied head stays one tensor."""
        moved: dict[str, Any] = {
            f.name: value.to(device, dtype)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        if self.head is self.embedding:
            moved["head"] = moved["embedding"]
        return dataclasses.replace(self, **moved)


def read_teacher(folder: Path, spec: TargetSpec) -> TeacherHead:
    """Read the teacher's tensors from where the target's weights lie, and nothing else of it.

    A quantised embedding or head becomes plain values. Raises: UserError when a tensor is missing or
    quantised in a way that is not read; ContractError when a shape is not the target's.
    """
    weights = Weights(folder)
    final_norm = f"{weights.prefix}{family_of(spec.architecture).final_norm}"
    dtype = getattr(torch, spec.dtype)
    embedding = read_weight(weights, f"{weights.prefix}embed_tokens", dtype)
    head = embedding
    if weights.head is not None:
        head = read_weight(weights, weights.head, dtype)
        if spec.tied_head:
            head = _same(head, embedding, weights)
    for name, tensor in (("embedding", embedding), ("head", head)):
        if tensor.shape != (spec.vocab_size, spec.hidden_size):
            raise ContractError(
                f"the target's {name} is {tuple(tensor.shape)}, its configuration says "
                f"{(spec.vocab_size, spec.hidden_size)}",
                hint="the model folder is damaged or mixed from two models",
            )
    return TeacherHead(
        weights.read(f"{final_norm}.weight"),
        head,
        embedding,
        spec.norm_kind,
        spec.norm_eps,
        spec.logit_softcap,
        spec.logit_scale,
        weights.read_if_there(f"{final_norm}.bias"),
        weights.read_if_there(f"{weights.head}.bias"),
    )


def _same(head: torch.Tensor, embedding: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Some checkpoints of tied models hold the head a second time; it must be the embedding."""
    if not torch.equal(head, embedding):
        raise ContractError(
            f"config.json of {weights.files.where} ties the head to the embedding, "
            f"but its weights hold another head ({weights.head})",
            hint="engines differ in which one they use: set tie_word_embeddings to what is meant",
        )
    return embedding


# What a draft's layer can start from, with grouped heads or latent attention.
_LAYER_NAMES = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.q_a_proj",
    "self_attn.q_a_layernorm",
    "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_a_layernorm",
    "self_attn.kv_b_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def read_last_layer(folder: Path, spec: TargetSpec) -> dict[str, torch.Tensor]:
    """Read those dense, unquantised weights of the last layer that a draft can start from.

    Names are those in a Llama or DeepSeek layer; norms are given as what they multiply by.
    """
    weights, family = Weights(folder), family_of(spec.architecture)
    layer = f"{weights.prefix}layers.{spec.num_layers - 1}."
    names = {f"{name}.weight": f"{layer}{name}.weight" for name in _LAYER_NAMES}
    names["post_attention_layernorm.weight"] = f"{layer}{family.mlp_norm}.weight"
    there = {name: full for name, full in names.items() if full in weights.file_of}
    plain = {name: full for name, full in there.items() if weights.entry(full).dtype in PLAIN}
    tensors = {name: weights.read(full) for name, full in plain.items()}
    one_plus = 1.0 if spec.norm_kind == "rms_one_plus" else 0.0
    return {n: t + one_plus if n.endswith("layernorm.weight") else t for n, t in tensors.items()}
