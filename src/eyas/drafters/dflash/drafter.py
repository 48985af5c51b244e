"""DFlash as a kind of draft: what the rest of eyas asks of it."""

from collections.abc import Mapping
from typing import Any

import torch

from eyas.config.schema import TrainSettings
from eyas.drafters.base import Drafter, Objective
from eyas.drafters.common.block.drafter import BlockDrafter, describe, make_block_objective
from eyas.drafters.dflash.config import DFlashConfig, config_for, mix_of
from eyas.drafters.dflash.model import DFlashDraft
from eyas.drafters.dflash.settings import Settings
from eyas.targets.teacher import TeacherHead
from eyas.types import TargetSpec

_TITLES = {"d-pace": "cross-entropy with D-PACE weights", "ce": "cross-entropy", "kl": "KL"}


class DFlash(BlockDrafter):
    name = "dflash"
    title = "DFlash"
    tables: frozenset[str] = frozenset()
    first_slot = DFlashConfig.first_slot

    def config_for(self, spec: TargetSpec, settings: Settings, vocab_size: int) -> DFlashConfig:
        return config_for(spec, settings, vocab_size)

    def config_from_json(self, value: Mapping[str, Any]) -> DFlashConfig:
        return DFlashConfig.from_json(value)

    def build(self, config: DFlashConfig) -> DFlashDraft:
        return DFlashDraft(config)

    def describe_training(self, settings: Settings) -> str:
        loss = _TITLES[settings.loss]
        return describe(settings, loss)

    def objective(
        self,
        draft: DFlashDraft,
        teacher: TeacherHead,
        target_ids: torch.Tensor,
        settings: Settings,
        train: TrainSettings,
        dtype: torch.dtype,
        device: torch.device,
        sharded: bool,
    ) -> Objective:
        return make_block_objective(draft, teacher, target_ids, mix_of(settings), dtype, device, sharded)


DRAFTER: Drafter = DFlash()
