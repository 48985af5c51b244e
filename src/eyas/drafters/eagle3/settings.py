"""Settings of an EAGLE-3 draft: its section of the run file."""

from typing import Literal

from pydantic import Field, PositiveInt

from eyas.config.schema import DraftSettings


class Settings(DraftSettings):
    """EAGLE-3 and 3.1. A shape that is left out is copied from the target."""

    num_layers: PositiveInt = Field(1, description="decoder layers; more than one train on the plain path")
    hidden_size: PositiveInt | None = Field(
        None,
        description="width of the draft; if it differs from the target's, the draft trains its own embedding",
    )
    intermediate_size: PositiveInt | None = Field(None, description="width of the draft's MLP")
    attention: Literal["gqa", "mla"] = Field(
        "gqa",
        description="gqa: grouped heads; mla: the target's latent attention, trained on the plain path",
    )
    num_attention_heads: PositiveInt | None = Field(None, description="query heads")
    num_key_value_heads: PositiveInt | None = Field(None, description="key/value heads")
    sliding_window: PositiveInt | None = Field(
        None, description="tokens back that the draft sees, the newest included, in every layer; null: all"
    )
    fc_norm: bool = Field(
        True,
        description="EAGLE-3.1: norm each aux layer before they are fused; layer and fc then start as noise, "
        "without it as the target's last layer and a pass-through",
    )
    norm_output: bool = Field(True, description="EAGLE-3.1: later draft steps read the normed state")
    ttt_steps: PositiveInt = Field(7, description="S, steps of the draft on its own states in training")
    ttt_step_loss_decay: float = Field(
        0.8, gt=0, le=1, description="weight of the loss of step s is ttt_step_loss_decay ** s"
    )
    loss: Literal["kl", "lk", "hybrid"] = Field(
        "kl", description="KL to the teacher, or acceptance itself (LK losses): its -log, or a mix with KL"
    )
