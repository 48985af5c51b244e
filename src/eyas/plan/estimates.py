"""What a run takes, as arithmetic: draft parameters, bytes on disk, memory. Each formula says its source."""

from dataclasses import dataclass

import torch

from eyas.config.schema import RunConfig
from eyas.drafters.base import DraftConfig, Drafter
from eyas.plan.target_size import ITEMSIZE, TargetSize
from eyas.train.optim import suits_muon

_LOSS_ROWS = 4096  # rows whose logits exist at once
_INPUT_IDS_BYTES = 5  # token id and mask of one token in a shard


@dataclass(frozen=True)
class Tokens:
    """Tokens of the samples; estimates unless ``basis`` says counted."""

    train: float
    held_out: float
    supervised_share: float
    conversations: float
    basis: str
    exact: bool = False

    @property
    def total(self) -> float:
        return self.train + self.held_out


@dataclass(frozen=True)
class PlannedDraft:
    """A draft of a kind, before it is built."""

    drafter: Drafter
    config: DraftConfig

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters, which have shapes and no memory."""
        with torch.device("meta"):
            parameters: dict[str, torch.nn.Parameter] = self.drafter.build(self.config).trainable()
        return parameters


def draft_parameters(draft: PlannedDraft) -> int:
    """Return how many parameters training changes."""
    return sum(p.numel() for p in draft.trainable().values())


def _moments(draft: PlannedDraft, optimizer: str) -> int:
    """Return how many values the optimizers keep: AdamW two a parameter, Muon one."""
    is_muon, not_for_it = optimizer == "muon", draft.drafter.heads | draft.drafter.tables
    return sum(
        p.numel() * (1 if is_muon and suits_muon(name, p, not_for_it) else 2)
        for name, p in draft.trainable().items()
    )


def state_bytes(shape: TargetSize, tokens: Tokens) -> int:
    """Return bytes of all states: aux of every token, the last layer of supervised ones."""
    spec = shape.spec
    row = spec.hidden_size * ITEMSIZE[spec.dtype]
    per_token = spec.num_aux_layers * row + tokens.supervised_share * row + _INPUT_IDS_BYTES
    return round(tokens.total * per_token)


def checkpoint_bytes(draft: PlannedDraft, optimizer: str) -> int:
    """Return bytes of the last, the best and one being written: weights and moments each."""
    return 3 * 4 * (draft_parameters(draft) + _moments(draft, optimizer))


def export_bytes(draft: PlannedDraft, shape: TargetSize) -> int:
    return draft_parameters(draft) * ITEMSIZE[shape.spec.dtype] + 9 * draft.config.vocab_size


def training_memory(
    config: RunConfig, draft: PlannedDraft, shape: TargetSize, supervised_share: float
) -> int:
    """Return bytes on the training device.

    Weights, gradients and moments in fp32, a copy in the compute type; the target's embedding and head;
    what a batch keeps. On one H200 the figures of benchmarks/LOG.md are met within 15 % (a test compares).
    With train.shard the fp32 parts are divided, and a batch's gradients stand beside the copy, one of them in
    fp32 on its way to the sum; no GPU has measured that.
    """
    item = ITEMSIZE.get(config.train.compute_dtype, 2)  # what is chosen by itself is bfloat16 on a GPU
    sizes = [p.numel() for p in draft.trainable().values()]
    parameters = sum(sizes)
    fp32 = 4 * (2 * parameters + _moments(draft, config.train.optimizer))
    weights = fp32 + parameters * (item if item < 4 else 0)
    if config.train.shard and config.train.num_gpus > 1:
        weights = fp32 // config.train.num_gpus + parameters * 2 * item + 4 * max(sizes)
    spec, tokens = shape.spec, config.train.batch_tokens
    teacher = spec.vocab_size * spec.hidden_size * item * (1 if spec.tied_head else 2)
    rows = tokens * supervised_share
    kept = rows * draft.drafter.values_kept(draft.config, config.draft, config.train.recompute) * item
    inputs = tokens * (spec.num_aux_layers + 2) * spec.hidden_size * item
    logits = min(rows, _LOSS_ROWS) * (draft.config.vocab_size * 2 + spec.vocab_size) * item
    return round(weights + teacher + kept + inputs + logits)
