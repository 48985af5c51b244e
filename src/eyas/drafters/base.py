"""What a kind of draft offers; the rest of eyas knows drafts through these protocols alone.

A kind is one folder of ``eyas.drafters`` and one line in ``eyas.registry.DRAFTERS``, or a package elsewhere
that an entry point in the group ``eyas.drafters`` names. Its files, by name:

    settings.py   ``Settings``: its section of the run file (pydantic only; imports no torch)
    drafter.py    ``DRAFTER``: a Drafter
    config.py     the shape of a draft; travels in checkpoints
    model.py      the torch module
    objective.py  the loss and its sums
    propose.py    drafting tokens in this process
    export.py     the functions of ExportFile: tensors and config.json for engines
    load.py       the functions of LoadFile: drafts as they are published
    vllm.py       the names of VllmFile; without it vLLM serves no such draft (imports no torch)
    sglang.py     the names of SglangFile; without it SGLang serves no such draft (imports no torch)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from eyas.config.schema import TrainSettings
from eyas.drafters.common.batch import BatchPlan, PackedBatch
from eyas.drafters.common.stored import StoredDraft
from eyas.layer_ids import ReadLayers
from eyas.targets.teacher import TeacherHead
from eyas.types import HiddenStates, TargetSpec, VocabMap

# Takes a parameter's name and its whole gradient, to be added up over ranks.
HandOver = Callable[[str, torch.Tensor], None]


class DraftConfig(Protocol):
    """A frozen dataclass: all it takes to build a draft.

    ``vocab_size`` W is the draft's vocabulary, ``target_vocab_size`` V the target's. ``sliding_window`` is
    how many tokens back the draft sees, None where it sees all of them.
    """

    @property
    def hidden_size(self) -> int: ...
    @property
    def target_hidden_size(self) -> int: ...
    @property
    def num_aux_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def target_vocab_size(self) -> int: ...
    @property
    def sliding_window(self) -> int | None: ...
    @property
    def has_own_embedding(self) -> bool:
        """Whether the draft trains an embedding of its width; else it uses the target's."""

    def to_json(self) -> dict[str, Any]: ...


class Draft(Protocol):
    """A torch module. ``embed_tokens`` [V, D] is the target's and frozen unless the draft has its own."""

    config: Any
    embed_tokens: nn.Embedding

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that training changes, by name: those that checkpoints and exports hold."""


@dataclass(frozen=True)
class Rounds:
    """What serving would accept. Shapes, for each packed position at which a round can start, ascending:
    rows [R]; accepted [R], draft tokens that agree with the target before the first that does not;
    depth [R], draft tokens that could be judged."""

    rows: torch.Tensor
    accepted: torch.Tensor
    depth: torch.Tensor


class Objective(Protocol):
    """A draft's loss over packed batches, on one device, by the fastest path that fits it.

    One optimizer step is ``start``, ``backward`` for each batch, ``finish``. Then every trained parameter has
    its gradient in ``grad``. ``eyas.drafters.common.objective`` has the half that is the same with autograd.
    """

    @property
    def copies(self) -> Mapping[torch.Tensor, torch.Tensor] | None:
        """Copies of parameters in the compute dtype, which the optimizers refresh; None without kernels."""

    @property
    def num_sums(self) -> int:
        """Length of the vector of sums. Entry 0 is the weighted loss, the last one the supervised rows."""

    def hand_over_to(self, take: HandOver) -> None:
        """Hand each gradient to ``take`` between ``expect_last`` and ``finish``, always in one order."""

    def start(self) -> None:
        """Forget the gradients of the last step."""

    def expect_last(self) -> None:
        """Be told that the next batch is the last of this step."""

    def finish(self) -> None:
        """End the step: gradients that no batch completed are handed over too."""

    def refresh(self) -> None:
        """Read the weights again, which something other than the optimizer changed."""

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
    heads: frozenset[str]  # parameters that train.train_head=false leaves as they are
    tables: frozenset[str]  # further matrices with a row a token; neither is for Muon

    def default_aux_layer_ids(self, num_layers: int) -> tuple[int, ...]: ...
    def config_for(self, spec: TargetSpec, settings: Any, vocab_size: int) -> Any:
        """Return the shape of a draft for a target; ``spec.aux_layer_ids`` are those that it reads.

        Raises: UserError for an impossible shape.
        """

    def config_from_json(self, value: Mapping[str, Any]) -> Any: ...
    def build(self, config: Any) -> Any: ...
    def initialise(
        self, draft: Any, folder: Path, teacher: TeacherHead, spec: TargetSpec, vocab: VocabMap, seed: int
    ) -> None:
        """Start a new draft from the target in ``folder``; ``teacher`` is its head, in fp32 on the CPU."""

    def plan(self, supervised: torch.Tensor, documents: torch.Tensor, settings: Any, draw: int) -> BatchPlan:
        """Choose what of a batch is trained. Shapes: supervised [N] bool, documents [N] ascending.

        ``draw`` seeds what is chosen by chance; it is another number for every batch of every epoch.
        """

    def cost_of(self, supervised: np.ndarray, settings: Any) -> float:
        """Return about how much work a sample is, in supervised rows; ``supervised`` [T] bool."""

    def most_draft_tokens(self, settings: Any) -> int | None:
        """Return how many tokens one round can draft at most; None: any number."""

    def values_kept(self, config: Any, settings: Any, recompute: bool) -> float:
        """Return how many values of a supervised row are kept for the backward pass, for memory estimates."""

    def describe_training(self, settings: Any) -> str:
        """Say in some words how the loss is made, for a model card."""

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
    ) -> Objective:
        """Return what trains the draft. ``sharded``: its parameters are compute copies of masters that ranks
        hold slices of."""

    def proposer(self, draft: Any, target_ids: torch.Tensor) -> Proposer: ...
    def replay(
        self,
        draft: Any,
        teacher: TeacherHead,
        target_ids: torch.Tensor,
        states: HiddenStates,
        num_draft_tokens: int,
    ) -> Rounds:
        """Say of one sample's stored states what rounds of ``num_draft_tokens`` would accept."""


class ExportFile(Protocol):
    """A kind's ``export.py``."""

    def tensors(self, draft: Any) -> dict[str, torch.Tensor]:
        """Return what engines load, by their names; the target's embedding is left out."""

    def native_config(self, config: Any, spec: TargetSpec, vocab: VocabMap) -> dict[str, Any]:
        """Return the config.json that vLLM and SGLang read."""

    def check_speculators(self, config: Any) -> None:
        """Raises: UserError for a draft that has no form in the speculators format."""

    def speculators_config(self, native: dict[str, Any]) -> dict[str, Any]:
        """Return the config.json of the speculators format from the native one."""

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Raises: ContractError for a written config.json that contradicts itself."""

    def logits(self, draft: Any, aux: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits that every tensor matters for, of rows (aux [R, A, D], the token after each [R])."""


class LoadFile(Protocol):
    """A kind's ``load.py``."""

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json, native or of the speculators format, describes a draft of this kind."""

    def check(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Raises: UserError for a draft that eyas does not compute; no tensor is read."""

    def read(self, folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> StoredDraft:
        """Make a draft of a folder's tensors. Raises: UserError or ContractError for what does not fit."""


class VllmFile(Protocol):
    """A kind's ``vllm.py``."""

    OLDEST: tuple[int, int]  # the version that serves these drafts and those after it
    ON_CPU: bool  # whether its CPU build serves them
    TARGET_INTERFACE: str  # the question of vllm.model_executor.models.interfaces to the target's class

    def speculative_config(self, draft: str, num_draft_tokens: int) -> dict[str, Any]:
        """Return vLLM's --speculative-config for the draft in a folder."""


class SglangFile(Protocol):
    """A kind's ``sglang.py``."""

    def arguments(self, draft: str, num_draft_tokens: int) -> list[str]:
        """Return the words of SGLang's command line that name the draft and how it drafts."""

    def trouble(self, config: Any, layers: ReadLayers | None) -> str | None:
        """Say why SGLang would not compute this draft as it was trained, or None.

        ``layers`` None: the target is not known.
        """

    def check_layers(self, layers: ReadLayers) -> None:
        """Raises: UserError for layers that no ids in config.json can name."""

    def oldest(self, layers: ReadLayers) -> str:
        """Return the oldest version of SGLang that serves such a draft as it was trained."""
