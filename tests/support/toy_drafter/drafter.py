"""The toy as eyas asks about it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.config.schema import TrainSettings
from eyas.drafters.base import Rounds
from eyas.drafters.common.batch import pack_batch
from eyas.targets.teacher import TeacherHead
from eyas.types import HiddenStates, TargetSpec, VocabMap
from toy_drafter.config import ToyConfig
from toy_drafter.model import ToyDraft
from toy_drafter.objective import ToyObjective, ToyPlan, plan_rounds, replay
from toy_drafter.propose import ToyProposer
from toy_drafter.settings import Settings


class Toy:
    name, title = "toy", "Toy"
    heads, tables = frozenset({"lm_head.weight"}), frozenset[str]()

    def default_aux_layer_ids(self, num_layers: int) -> tuple[int, ...]:
        return (1, num_layers)

    def config_for(self, spec: TargetSpec, settings: Settings, vocab_size: int) -> ToyConfig:
        width, num_aux = spec.hidden_size, spec.num_aux_layers
        return ToyConfig(width, width, num_aux, vocab_size, spec.vocab_size, settings.num_tokens)

    def config_from_json(self, value: Mapping[str, Any]) -> ToyConfig:
        return ToyConfig(**value)

    def build(self, config: ToyConfig) -> ToyDraft:
        return ToyDraft(config)

    def initialise(
        self,
        draft: ToyDraft,
        folder: Path,
        teacher: TeacherHead,
        spec: TargetSpec,
        vocab: VocabMap,
        seed: int,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            draft.fc.weight.normal_(0, 0.02, generator=generator)
            draft.fc.weight[:, -spec.hidden_size :] += torch.eye(spec.hidden_size)
            draft.shift.weight.normal_(0, 0.02, generator=generator)
            draft.embed_tokens.weight.copy_(teacher.embedding)
            draft.norm.weight.copy_(teacher.norm_weight)
            draft.lm_head.weight.copy_(teacher.head[torch.from_numpy(vocab.target_ids)])

    def plan(
        self, supervised: torch.Tensor, documents: torch.Tensor, settings: Settings, draw: int
    ) -> ToyPlan:
        return plan_rounds(supervised, documents, settings.num_tokens, settings.anchor_share, draw)

    def cost_of(self, supervised: np.ndarray, settings: Settings) -> float:
        return float(supervised.sum())

    def most_draft_tokens(self, settings: Settings) -> None:
        return None

    def values_kept(self, config: ToyConfig, settings: Settings, recompute: bool) -> float:
        return 4.0 * config.hidden_size * config.num_tokens

    def describe_training(self, settings: Settings) -> str:
        return f"KL over {settings.num_tokens} tokens"

    def objective(
        self,
        draft: ToyDraft,
        teacher: TeacherHead,
        target_ids: torch.Tensor,
        settings: Settings,
        train: TrainSettings,
        dtype: torch.dtype,
        device: torch.device,
        sharded: bool,
    ) -> ToyObjective:
        frozen = frozenset() if train.train_head else self.heads
        return ToyObjective(draft, teacher, target_ids, frozen=frozen, dtype=dtype, device=device)

    def proposer(self, draft: ToyDraft, target_ids: torch.Tensor) -> ToyProposer:
        return ToyProposer(draft, target_ids)

    def replay(
        self,
        draft: ToyDraft,
        teacher: TeacherHead,
        target_ids: torch.Tensor,
        states: HiddenStates,
        num_draft_tokens: int,
    ) -> Rounds:
        def every_round(supervised: torch.Tensor, documents: torch.Tensor) -> ToyPlan:
            return plan_rounds(supervised, documents, draft.config.num_tokens, 1.0, 0)

        batch = pack_batch([states], every_round, target_ids.device, torch.float32)
        return replay(draft, teacher, target_ids, batch)[1]


DRAFTER = Toy()
