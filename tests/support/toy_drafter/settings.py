"""Settings of a toy draft."""

from pydantic import Field, PositiveInt

from eyas.config.schema import DraftSettings


class Settings(DraftSettings):
    """Toys for tests."""

    architecture: str = "toy"
    num_tokens: PositiveInt = Field(4, description="tokens of a round, S")
    anchor_share: float = Field(
        0.5, gt=0, le=1, description="share of the rows that a batch trains, by chance"
    )
