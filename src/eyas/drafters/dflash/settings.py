"""The settings of a DFlash draft."""

from typing import Literal

from pydantic import Field

from eyas.drafters.common.block.settings import BlockSettings


class Settings(BlockSettings):
    """DFlash: slot k of a block fills in token a + k; slot 0 predicts nothing."""

    architecture: str = Field("dflash", description="kind of draft; it decides which settings follow")
    loss: Literal["d-pace", "ce", "kl"] = Field(
        "d-pace",
        description="d-pace: cross-entropy, weighted by what a prediction adds to the accepted length; "
        "ce, kl: weights that fall with the place in the block",
    )
    dpace_alpha: float = Field(0.5, ge=0, lt=1, description="loss=d-pace: how much its weights are smoothed")
    gamma: float | None = Field(
        None,
        gt=0,
        description="loss=ce or kl: prediction j weighs exp(-j / gamma); default 7, or 4 for B up to 8",
    )
