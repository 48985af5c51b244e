"""The shape of a DSpark draft."""

from dataclasses import dataclass
from typing import ClassVar

from eyas.drafters.common.block.config import BlockConfig, shape_for
from eyas.drafters.common.block.loss import LossMix
from eyas.drafters.dspark.settings import Settings
from eyas.types import TargetSpec


@dataclass(frozen=True)
class DSparkConfig(BlockConfig):
    """Every slot predicts, slot 0 the token behind the anchor: B draft tokens."""

    first_slot: ClassVar[int] = 0

    markov_rank: int = 256


def config_for(spec: TargetSpec, settings: Settings, vocab_size: int) -> DSparkConfig:
    shape = shape_for(spec, settings, vocab_size)
    return DSparkConfig(**shape, markov_rank=settings.markov_rank)


def mix_of(settings: Settings) -> LossMix:
    """Return the losses that the settings ask for; the confidence's stands apart."""
    return LossMix(ce=settings.ce_weight, l1=settings.l1_weight, gamma=settings.gamma)
