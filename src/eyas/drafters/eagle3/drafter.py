"""EAGLE-3 as a kind of draft: what the rest of eyas asks of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.config.schema import TrainSettings
from eyas.drafters.base import Drafter, Objective, Rounds
from eyas.drafters.common.batch import pack_batch
from eyas.drafters.eagle3.config import DraftConfig, draft_config_for
from eyas.drafters.eagle3.model import HEADS, TABLES, Eagle3Draft
from eyas.drafters.eagle3.objective import make_objective
from eyas.drafters.eagle3.propose import DraftChain
from eyas.drafters.eagle3.settings import Settings
from eyas.drafters.eagle3.ttt_rows import RowPlan, plan_rows, rows_of
from eyas.drafters.eagle3.unroll import run_unroll
from eyas.layer_ids import default_aux_layer_ids
from eyas.targets.teacher import TeacherHead, read_last_layer
from eyas.types import HiddenStates, TargetSpec, VocabMap

# What a token costs whose row no step supervises, of what a supervised row costs: it runs fc and the step-0
# keys and values only. From the matrix products of an 8B shape at S = 7; all that is asked of it is a guess
# that orders batches.
_UNSUPERVISED_SHARE = 0.02
# Values a supervised row keeps a step: the MLP's three intermediate tensors, and about a dozen of the width.
_KEPT_MLP, _KEPT_WIDTH = 3, 12


class Eagle3:
    name = "eagle3"
    title = "EAGLE-3"
    heads, tables = HEADS, TABLES

    def default_aux_layer_ids(self, num_layers: int) -> tuple[int, ...]:
        return default_aux_layer_ids(num_layers)

    def config_for(self, spec: TargetSpec, settings: Settings, vocab_size: int) -> DraftConfig:
        return draft_config_for(
            spec,
            vocab_size,
            settings.intermediate_size,
            settings.num_attention_heads,
            settings.num_key_value_heads,
            settings.fc_norm,
            settings.norm_output,
            settings.hidden_size,
            num_layers=settings.num_layers,
            attention=settings.attention,
            sliding_window=settings.sliding_window,
        )

    def config_from_json(self, value: Mapping[str, Any]) -> DraftConfig:
        return DraftConfig.from_json(value)

    def build(self, config: DraftConfig) -> Eagle3Draft:
        return Eagle3Draft(config)

    def initialise(
        self,
        draft: Eagle3Draft,
        folder: Path,
        teacher: TeacherHead,
        spec: TargetSpec,
        vocab: VocabMap,
        seed: int,
    ) -> None:
        norm = teacher.norm_weight + (1.0 if teacher.norm_kind == "rms_one_plus" else 0.0)
        # A scale of the logits becomes part of the draft's rows; engines apply none to a draft.
        rows = teacher.head[torch.from_numpy(vocab.target_ids)] * teacher.logit_scale
        # With fc_norm nothing of it is used, and a large target's is far away.
        last_layer = {} if draft.config.fc_norm else read_last_layer(folder, spec)
        draft.initialise(teacher.embedding, rows, norm, last_layer, seed)

    def plan(
        self, supervised: torch.Tensor, documents: torch.Tensor, settings: Settings, draw: int
    ) -> RowPlan:
        """Plan every row that serving could reach; nothing is drawn."""
        return plan_rows(supervised, documents, settings.ttt_steps)

    def cost_of(self, supervised: np.ndarray, settings: Settings) -> float:
        return float(supervised.sum() + _UNSUPERVISED_SHARE * len(supervised))

    def most_draft_tokens(self, settings: Settings) -> None:
        return None

    def values_kept(self, config: DraftConfig, settings: Settings, recompute: bool) -> float:
        mlp = _KEPT_MLP * config.intermediate_size * (1 if recompute else settings.ttt_steps)
        return mlp + _KEPT_WIDTH * config.hidden_size * settings.ttt_steps

    def describe_training(self, settings: Settings) -> str:
        return f"{settings.loss} loss, unrolled {settings.ttt_steps} steps"

    def objective(
        self,
        draft: Eagle3Draft,
        teacher: TeacherHead,
        target_ids: torch.Tensor,
        settings: Settings,
        train: TrainSettings,
        dtype: torch.dtype,
        device: torch.device,
        sharded: bool,
    ) -> Objective:
        return make_objective(draft, teacher, target_ids, settings, train, dtype, device, sharded)

    def proposer(self, draft: Eagle3Draft, target_ids: torch.Tensor) -> DraftChain:
        return DraftChain(draft, target_ids)

    def replay(
        self,
        draft: Eagle3Draft,
        teacher: TeacherHead,
        target_ids: torch.Tensor,
        states: HiddenStates,
        num_draft_tokens: int,
    ) -> Rounds:
        weight = draft.fc.weight
        batch = pack_batch([states], rows_of(num_draft_tokens), target_ids.device, weight.dtype)
        result = run_unroll(draft, teacher, target_ids, batch, step_decay=1.0)
        return Rounds(batch.plan.rows[0], result.accepted, result.depth)


DRAFTER: Drafter = Eagle3()
