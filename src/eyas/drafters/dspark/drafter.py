"""DSpark as a kind of draft: what the rest of eyas asks of it."""

from collections.abc import Mapping
from typing import Any

import torch

from eyas.config.schema import TrainSettings
from eyas.drafters.base import Drafter, Objective
from eyas.drafters.common.block.drafter import BlockDrafter, describe, make_block_objective
from eyas.drafters.dspark.config import DSparkConfig, config_for, mix_of
from eyas.drafters.dspark.model import TABLES, DSparkDraft
from eyas.drafters.dspark.objective import ConfidenceLoss
from eyas.drafters.dspark.settings import Settings
from eyas.targets.teacher import TeacherHead
from eyas.types import TargetSpec


class DSpark(BlockDrafter):
    name = "dspark"
    title = "DSpark"
    tables: frozenset[str] = TABLES
    first_slot = DSparkConfig.first_slot

    def config_for(self, spec: TargetSpec, settings: Settings, vocab_size: int) -> DSparkConfig:
        return config_for(spec, settings, vocab_size)

    def config_from_json(self, value: Mapping[str, Any]) -> DSparkConfig:
        return DSparkConfig.from_json(value)

    def build(self, config: DSparkConfig) -> DSparkDraft:
        return DSparkDraft(config)

    def describe_training(self, settings: Settings) -> str:
        weights = (settings.ce_weight, settings.l1_weight, settings.confidence_weight)
        loss = "{:g} CE + {:g} L1 + {:g} confidence".format(*weights)
        return describe(settings, loss)

    def objective(
        self,
        draft: DSparkDraft,
        teacher: TeacherHead,
        target_ids: torch.Tensor,
        settings: Settings,
        train: TrainSettings,
        dtype: torch.dtype,
        device: torch.device,
        sharded: bool,
    ) -> Objective:
        further = ConfidenceLoss(settings.confidence_weight, settings.gamma)
        return make_block_objective(
            draft, teacher, target_ids, mix_of(settings), dtype, device, sharded, further
        )


DRAFTER: Drafter = DSpark()
