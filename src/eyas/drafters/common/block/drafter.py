"""What all kinds of block drafts answer when the rest of eyas asks."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.drafters.base import Rounds
from eyas.drafters.common.batch import pack_batch
from eyas.drafters.common.block.anchors import BlockPlan, num_blocks, plan_blocks
from eyas.drafters.common.block.config import BlockConfig, default_block_layer_ids
from eyas.drafters.common.block.fast import FastBlockObjective
from eyas.drafters.common.block.judge import BlockJudge
from eyas.drafters.common.block.loss import LossMix
from eyas.drafters.common.block.mask_token import choose_mask_token
from eyas.drafters.common.block.model import BlockDraft
from eyas.drafters.common.block.objective import BlockObjective, FurtherLoss
from eyas.drafters.common.block.propose import BlockProposer, check_num_draft_tokens
from eyas.drafters.common.block.settings import BlockSettings
from eyas.drafters.common.stored import share_target
from eyas.targets.teacher import TeacherHead
from eyas.types import HiddenStates, TargetSpec, VocabMap

# What a context token costs (fc, keys and values), of what a slot costs (all layers and the head).
_CONTEXT_SHARE = 0.1
# Values a slot keeps in each layer: the MLP's three intermediate tensors, and about a dozen of the width.
_KEPT_MLP, _KEPT_WIDTH = 3, 12


class BlockDrafter:
    """The half of a Drafter that DFlash and DSpark share. ``first_slot``: the first slot that predicts."""

    heads: frozenset[str] = frozenset()
    first_slot: int

    def default_aux_layer_ids(self, num_layers: int) -> tuple[int, ...]:
        return default_block_layer_ids(num_layers)

    def initialise(
        self,
        draft: BlockDraft,
        folder: Path,
        teacher: TeacherHead,
        spec: TargetSpec,
        vocab: VocabMap,
        seed: int,
    ) -> None:
        """Start a draft as noise, with the target's norm, embedding and head, and a mask token."""
        if draft.config.mask_token_id is None:
            mask = choose_mask_token(read_tokenizer(folder), spec.vocab_size, spec.eos_token_ids)
            draft.config = dataclasses.replace(draft.config, mask_token_id=mask)
        share_target(draft, teacher.embedding, teacher.head, torch.from_numpy(vocab.target_ids))
        draft.start(teacher.norm_weight + (1.0 if teacher.norm_kind == "rms_one_plus" else 0.0), seed)

    def plan(
        self, supervised: torch.Tensor, documents: torch.Tensor, settings: BlockSettings, draw: int
    ) -> BlockPlan:
        return plan_blocks(supervised, documents, self._predictions(settings), settings.num_anchors, draw)

    def cost_of(self, supervised: np.ndarray, settings: BlockSettings) -> float:
        slots = num_blocks(supervised, settings.num_anchors) * settings.block_size
        return float(slots + _CONTEXT_SHARE * len(supervised))

    def most_draft_tokens(self, settings: BlockSettings) -> int:
        return self._predictions(settings)

    def values_kept(self, config: BlockConfig, settings: BlockSettings, recompute: bool) -> float:
        """Return how many values a prediction keeps, of the slots of its block and of all layers."""
        a_slot = _KEPT_MLP * config.intermediate_size + _KEPT_WIDTH * config.hidden_size
        return config.num_layers * a_slot * config.block_size / config.num_predictions

    def proposer(self, draft: BlockDraft, target_ids: torch.Tensor) -> BlockProposer:
        return BlockProposer(draft, target_ids)

    @torch.no_grad()
    def replay(
        self,
        draft: BlockDraft,
        teacher: TeacherHead,
        target_ids: torch.Tensor,
        states: HiddenStates,
        num_draft_tokens: int,
    ) -> Rounds:
        weight = draft.fc.weight
        predictions = draft.config.num_predictions
        check_num_draft_tokens(predictions, num_draft_tokens)

        def planner(supervised: torch.Tensor, documents: torch.Tensor) -> BlockPlan:
            return plan_blocks(supervised, documents, predictions, num_anchors=0, draw=0)

        batch = pack_batch([states], planner, target_ids.device, weight.dtype)
        judge = BlockJudge(teacher, target_ids)
        objective = BlockObjective(draft, judge, LossMix(ce=1.0), weight.dtype, target_ids.device)
        return objective.rounds(batch, num_draft_tokens)

    def _predictions(self, settings: BlockSettings) -> int:
        return settings.block_size - self.first_slot


def make_block_objective(
    draft: BlockDraft,
    teacher: TeacherHead,
    target_ids: torch.Tensor,
    mix: LossMix,
    dtype: torch.dtype,
    device: torch.device,
    sharded: bool,
    further: FurtherLoss | None = None,
) -> BlockObjective:
    """Return the path that fits the device: on a GPU the fast one."""
    judge = BlockJudge(teacher, target_ids)
    if device.type == "cuda":
        return FastBlockObjective(draft, judge, mix, dtype, device, further, sharded)
    return BlockObjective(draft, judge, mix, dtype, device, further)


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in a target's folder, None where it has none."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return AutoTokenizer.from_pretrained(folder)


def describe(settings: BlockSettings, loss: str) -> str:
    """Say how the loss is made, for a model card."""
    return f"{loss}, {settings.num_anchors} blocks of {settings.block_size} slots in each conversation"
