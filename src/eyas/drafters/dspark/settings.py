"""The settings of a DSpark draft."""

from pydantic import Field, PositiveInt

from eyas.drafters.common.block.settings import BlockSettings


class Settings(BlockSettings):
    """DSpark: slot k of a block predicts token a + k + 1, corrected by the token before it."""

    architecture: str = Field("dspark", description="kind of draft; it decides which settings follow")
    block_size: int = Field(7, ge=2, description="B, slots of a block; all of them predict")
    markov_rank: PositiveInt = Field(256, description="rank of the head that corrects by the token before")
    ce_weight: float = Field(0.1, ge=0, description="weight of the cross-entropy")
    l1_weight: float = Field(0.9, ge=0, description="weight of the distance |q - p| from the target")
    confidence_weight: float = Field(
        1.0, ge=0, description="weight of the confidence's cross-entropy with the chance of acceptance"
    )
    gamma: float = Field(4.0, gt=0, description="prediction j weighs exp(-j / gamma)")
