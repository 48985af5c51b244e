"""The shape of a DFlash draft."""

from dataclasses import dataclass
from typing import ClassVar

from eyas.drafters.common.block.config import BlockConfig, shape_for
from eyas.drafters.common.block.loss import LossMix
from eyas.drafters.dflash.settings import Settings
from eyas.types import TargetSpec


@dataclass(frozen=True)
class DFlashConfig(BlockConfig):
    """Slot 0 reads the anchor and predicts nothing: B - 1 draft tokens."""

    first_slot: ClassVar[int] = 1


def config_for(spec: TargetSpec, settings: Settings, vocab_size: int) -> DFlashConfig:
    return DFlashConfig(**shape_for(spec, settings, vocab_size))


def mix_of(settings: Settings) -> LossMix:
    """Return the losses that the settings ask for."""
    gamma = settings.gamma or (4.0 if settings.block_size <= 8 else 7.0)
    if settings.loss == "d-pace":
        return LossMix(ce=1.0, dpace_alpha=settings.dpace_alpha)
    return LossMix(ce=1.0, gamma=gamma) if settings.loss == "ce" else LossMix(kl=1.0, gamma=gamma)
