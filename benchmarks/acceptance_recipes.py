"""The recipes that benchmarks/acceptance.py compares: two peers', ours, and ours with one lever moved."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Recipe:
    """Differences from the code's own defaults.

    init: "target" starts everything from the target, "head" only head and final norm, "scratch" nothing.
    data_share: share of the training answers, repeated so that the number of steps stays.
    """

    train: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)
    init: Literal["target", "head", "scratch"] = "target"
    aux_layer_ids: tuple[int, ...] | None = None
    data_share: float = 1.0


OURS: dict[str, Any] = {"learning_rate": 1e-3}


def _ours(**train: Any) -> Recipe:
    return Recipe({**OURS, **train})


def _shape(**draft: Any) -> Recipe:
    return Recipe(OURS, draft)


# Peers by what their documentation and code say, in our trainer: their own trainers are not run here.
_SPECFORGE = {
    "num_unroll_steps": 7,
    "step_decay": 0.8,
    "learning_rate": 1e-4,
    "max_grad_norm": 0.5,
    "warmup_share": 0.015,
    "betas": (0.9, 0.999),
}
# Muon's rate is ten times the other's there; what AdamW is left with here are the norms.
_SPECULATORS = {
    "num_unroll_steps": 3,
    "step_decay": 1.0,
    "optimizer": "muon",
    "train_head": False,
    "learning_rate": 1e-3,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "betas": (0.9, 0.999),
}

BASELINES = {
    "specforge": Recipe(_SPECFORGE, init="scratch"),
    "speculators": Recipe(_SPECULATORS, init="head"),
    "specforge, our rate": Recipe({**_SPECFORGE, **OURS}, init="scratch"),
}
LEVERS = {
    "lr 2e-3": _ours(learning_rate=2e-3),
    "lr 5e-4": _ours(learning_rate=5e-4),
    "hybrid loss": _ours(loss="hybrid"),
    "lk loss": _ours(loss="lk"),
    "muon 1e-3": _ours(optimizer="muon"),
    "muon 2e-3": _ours(optimizer="muon", learning_rate=2e-3),
    "eagle 3.1 norms": _shape(fc_norm=True, norm_output=True),
    "fc_norm": _shape(fc_norm=True),
    "norm_output": _shape(norm_output=True),
    "layer and fc from scratch": Recipe(OURS, init="head"),
    "all from scratch": Recipe(OURS, init="scratch"),
    "frozen head": _ours(train_head=False),
    "aux 2, 15, 29": Recipe(OURS, aux_layer_ids=(2, 15, 29)),
    "aux 15, 22, 27": Recipe(OURS, aux_layer_ids=(15, 22, 27)),
    "aux 2, 8, 15, 22, 29": Recipe(OURS, aux_layer_ids=(2, 8, 15, 22, 29)),
    "aux 29": Recipe(OURS, aux_layer_ids=(29,)),
    "step decay 1": _ours(step_decay=1.0),
    "step decay 0.6": _ours(step_decay=0.6),
    "K 4": _ours(num_unroll_steps=4),
    "W 8192": _shape(vocab_size=8192),
    "W full": _shape(vocab_size=None),
    "average 0.99": _ours(average_decay=0.99),
    "average 0.998": _ours(average_decay=0.998),
    "mlp 3072": _shape(intermediate_size=3072),
    "mlp 768": _shape(intermediate_size=768),
    "data 1/2": Recipe(OURS, data_share=1 / 2),
    "data 1/4": Recipe(OURS, data_share=1 / 4),
    "data 1/8": Recipe(OURS, data_share=1 / 8),
}
RECIPES = {**BASELINES, "ours": _ours(), **LEVERS}
