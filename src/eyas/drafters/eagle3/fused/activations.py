"""What the fused forward pass keeps of a batch for the backward pass, which overwrites it with gradients."""

from dataclasses import dataclass, field

import torch

from eyas.drafters.eagle3.config import DraftConfig
from eyas.drafters.eagle3.fused.layout import Steps


@dataclass
class Saved:
    """Activations of a batch; a leading axis of all steps' rows, but ``first_*``: of the step-0 keys."""

    fused_input: torch.Tensor
    first_hidden: torch.Tensor
    first_mixed: torch.Tensor
    first_kv: torch.Tensor
    mixed: torch.Tensor
    queries: torch.Tensor
    own_kv: torch.Tensor
    attended: torch.Tensor
    middle: torch.Tensor
    normed_middle: torch.Tensor
    gate_up: torch.Tensor
    activated: torch.Tensor
    hidden: torch.Tensor
    carried: torch.Tensor
    grad_normed: torch.Tensor
    lse: list[torch.Tensor] = field(default_factory=list)
    turns: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def room(
        cls,
        config: DraftConfig,
        steps: Steps,
        fused_input: torch.Tensor,
        first_hidden: torch.Tensor,
        first_mixed: torch.Tensor,
        first_kv: torch.Tensor,
        recompute: bool,
    ) -> "Saved":
        """Return what is known of the step-0 keys, and room for the activations of all steps.

        With ``recompute`` the steps share the place of the MLP's activations.
        """
        rows, width = steps.num_rows, config.hidden_size
        query_width = config.num_attention_heads * config.head_dim
        mlp_rows = max((here.stop - here.start for here in steps.rows), default=0) if recompute else rows
        room = first_kv.new_empty
        hidden = room(rows, width)
        return cls(
            fused_input,
            first_hidden,
            first_mixed,
            first_kv,
            mixed=room(rows, 2 * width),
            queries=room(rows, query_width),
            own_kv=room(steps.num_own, first_kv.shape[1]),
            attended=room(rows, query_width),
            middle=room(rows, width),
            normed_middle=room(mlp_rows, width),
            gate_up=room(mlp_rows, 2 * config.intermediate_size),
            activated=room(mlp_rows, config.intermediate_size),
            hidden=hidden,
            carried=room(rows, width) if config.norm_output else hidden,
            grad_normed=room(rows, width),
        )
