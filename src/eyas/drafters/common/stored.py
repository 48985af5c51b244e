"""A draft read from a folder, of any kind, and the module built from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas import registry
from eyas.errors import ContractError


@dataclass(frozen=True)
class StoredDraft:
    """``shape`` is the kind's DraftConfig; ``tensors`` have the module's own names; target_ids [W].

    ``aux_layer_ids`` are ours (stream after L layers), None where the folder does not name them and engines
    take their defaults. ``embedding`` [V, D] is the target's, where the folder brings it; ``config``
    its JSON.
    """

    architecture: str
    shape: Any
    aux_layer_ids: tuple[int, ...] | None
    target_ids: torch.Tensor
    tensors: dict[str, torch.Tensor]
    embedding: torch.Tensor | None
    config: dict[str, Any]

    def build(self, embedding: torch.Tensor | None, head: torch.Tensor | None = None) -> Any:
        """Build the draft; embedding and head [V, D] are the target's, for a draft that shares them."""
        draft = registry.drafter(self.architecture).build(self.shape)
        with torch.no_grad():
            for name, parameter in draft.trainable().items():
                parameter.copy_(self.tensors[name])
        share_target(draft, embedding, head, self.target_ids)
        return draft


@torch.no_grad()
def share_target(
    draft: Any, embedding: torch.Tensor | None, head: torch.Tensor | None, target_ids: torch.Tensor
) -> None:
    """Give a draft what it does not train of the target: its embedding [V, D], its head's rows of [W] ids."""
    if embedding is not None and not draft.config.has_own_embedding:
        draft.embed_tokens.weight.copy_(embedding)
    if head is not None and not draft.lm_head.weight.requires_grad:
        draft.lm_head.weight.copy_(head[target_ids.to(head.device)])


def check_tensors(folder: Path, wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Any]) -> None:
    """Compare names and shapes with what the configuration asks for. Raises: ContractError."""
    if set(wanted) != set(tensors):
        raise ContractError(
            f"{folder} has unknown or missing tensors: {sorted(set(wanted) ^ set(tensors))}",
            hint="the folder is damaged or of another kind; export or download it again",
        )
    for name, expected in wanted.items():
        if tuple(tensors[name].shape) != expected:
            raise ContractError(
                f"{folder}: {name} is {tuple(tensors[name].shape)}, its config.json asks for {expected}"
            )


def target_ids_of(folder: Path, d2t: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Return the target's id of each draft id [W]; engines compute it as draft id + d2t[draft id].

    Raises: ContractError for offsets of another vocabulary.
    """
    offsets = torch.zeros(vocab_size, dtype=torch.long) if d2t is None else d2t.long()
    if offsets.shape != (vocab_size,):
        raise ContractError(f"{folder}: d2t is {tuple(offsets.shape)}, its config.json asks for {vocab_size}")
    return torch.arange(len(offsets)) + offsets
