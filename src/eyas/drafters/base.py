"""What a kind of draft offers; the rest of eyas knows drafts through these protocols alone.

A kind is one folder of ``eyas.drafters`` and one line in ``eyas.registry.DRAFTERS``. Its files, by name:

    settings.py      ``Settings``: its section of the run file (pydantic only; imports no torch)
    drafter.py       ``DRAFTER``: the object below
    config.py        the shape of a draft; travels in checkpoints
    model.py         the torch module
    objective.py     the loss and its sums
    propose.py       drafting tokens in this process
    export.py        names and config.json of each format that engines load, and reading them back
    vllm.py, sglang.py   how that engine is told to serve it (import no torch)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from eyas.config.schema import TrainSettings
from eyas.drafters.common.batch import PackedBatch
from eyas.targets.teacher import TeacherHead
from eyas.types import TargetSpec, VocabMap


class DraftConfig(Protocol):
    """A frozen dataclass: all it takes to build a draft.

    ``vocab_size`` W is the draft's vocabulary, ``target_vocab_size`` V the target's.
    """

    hidden_size: int
    target_hidden_size: int
    num_aux_layers: int
    vocab_size: int
    target_vocab_size: int

    @property
    def has_own_embedding(self) -> bool: ...
    def to_json(self) -> dict[str, Any]: ...


class Draft(Protocol):
    """A torch module. ``embed_tokens`` [V, D] is the target's and frozen unless the draft has its own."""

    config: Any
    embed_tokens: nn.Embedding

    def trainable(self) -> dict[str, nn.Parameter]: ...


class BatchPlan(Protocol):
    """Which rows or anchors of a packed batch are trained; made on the CPU next to the batch.

    ``num_supervised`` is what summed losses are divided by, after adding up batches and ranks.
    """

    @property
    def num_supervised(self) -> int: ...
    def tensors(self) -> list[torch.Tensor]: ...
    def each(self, change: Any) -> "BatchPlan": ...


@dataclass(frozen=True)
class Rounds:
    """What serving would accept. Shapes, for each packed position at which a round can start, ascending:
    rows [R]; accepted [R], draft tokens that agree with the target before the first that does not;
    depth [R], draft tokens that could be judged."""

    rows: torch.Tensor
    accepted: torch.Tensor
    depth: torch.Tensor


class Objective(Protocol):
    """A draft's loss over packed batches, on one device, by the fastest path that fits it."""

    @property
    def num_sums(self) -> int:
        """Length of the vector of sums. Entry 0 is the weighted loss, the last one the supervised rows."""

    def backward(self, batch: PackedBatch) -> torch.Tensor:
        """Add the gradients of a batch's summed loss; return its sums, fp64 [num_sums] on the device."""

    def measure(self, batch: PackedBatch, num_draft_tokens: int) -> tuple[torch.Tensor, Rounds]:
        """Return the sums, and what rounds of ``num_draft_tokens`` would accept; no gradients."""

    def ratios(self, sums: Sequence[float]) -> dict[str, float | list[float]]:
        """Turn sums, added up over batches and ranks, into what is logged: ``loss`` and the kind's own."""


class Proposer(Protocol):
    """Drafts tokens for one sequence, with the cache that serving would have."""

    def propose(self, aux: torch.Tensor, following: Sequence[int], num_draft_tokens: int) -> list[int]:
        """Take newly verified rows (aux [R, A, D], and the token after each); draft behind the last token."""


class Drafter(Protocol):
    """One kind of draft."""

    name: str  # as in draft.architecture
    title: str  # as people call it

    def default_aux_layer_ids(self, num_layers: int) -> tuple[int, ...]: ...
    def config_for(self, spec: TargetSpec, settings: Any, vocab_size: int) -> Any: ...
    def config_from_json(self, value: Mapping[str, Any]) -> Any: ...
    def build(self, config: Any) -> Any: ...
    def initialise(self, draft: Any, folder: Path, spec: TargetSpec, vocab: VocabMap, seed: int) -> None:
        """Start a new draft from the target in ``folder``."""

    def plan(self, supervised: torch.Tensor, documents: torch.Tensor, settings: Any, draw: int) -> BatchPlan:
        """Choose what of a batch is trained. Shapes: supervised [N] bool, documents [N] ascending.

        ``draw`` seeds what is chosen by chance; it is another number for every batch of every epoch.
        """

    def cost_of(self, supervised: np.ndarray, settings: Any) -> float:
        """Return about how much work a sample is, in supervised rows; ``supervised`` [T] bool."""

    def objective(
        self,
        draft: Any,
        teacher: TeacherHead,
        target_ids: torch.Tensor,
        settings: Any,
        train: TrainSettings,
        dtype: torch.dtype,
        device: torch.device,
        sharded: bool,
    ) -> Objective: ...
    def proposer(self, draft: Any, target_ids: torch.Tensor) -> Proposer: ...
