"""The recipes that benchmarks/acceptance.py compares: two peers', ours, and ours with one lever moved."""

from dataclasses import dataclass, field
from typing import Any, Literal

OURS: dict[str, Any] = {"learning_rate": 2e-3}
WITHOUT_NORMS: dict[str, Any] = {"fc_norm": False, "norm_output": False}
ADAMW: dict[str, Any] = {**OURS, "optimizer": "adamw"}


@dataclass(frozen=True)
class Recipe:
    """Differences from the code's own defaults.

    start: what starts from the target: what eyas starts from it, "head" (and final norm) alone, or "nothing".
    data_share: share of the training answers, repeated so that the number of steps stays.
    stored: train on the data set's answers instead of the target's own, repeated likewise.
    """

    train: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)
    start: Literal["eyas", "head", "nothing"] = "eyas"
    aux_layer_ids: tuple[int, ...] | None = None
    data_share: float = 1.0
    stored: bool = False


def _ours(**train: Any) -> Recipe:
    return Recipe({**OURS, **train})


def _shape(**draft: Any) -> Recipe:
    return Recipe(OURS, draft)


def _aux(*layer_ids: int) -> Recipe:
    return Recipe(OURS, aux_layer_ids=layer_ids)


# Peers by what their documentation and code say, in our trainer; peers/ runs speculators' own.
_SPECFORGE_STEPS = {"ttt_steps": 7, "ttt_step_loss_decay": 0.8}
_SPECFORGE = {
    "optimizer": "adamw",
    "learning_rate": 1e-4,
    "max_grad_norm": 0.5,
    "warmup_share": 0.015,
    "betas": (0.9, 0.999),
}
# Its norms are left out here. Muon's rate is ten times the other's there; AdamW is left with the norms alone.
_SPECULATORS_STEPS = {"ttt_steps": 3, "ttt_step_loss_decay": 1.0}
_SPECULATORS = {
    "optimizer": "muon",
    "train_head": False,
    "learning_rate": 1e-3,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "betas": (0.9, 0.999),
}

BASELINES = {
    "specforge": Recipe(_SPECFORGE, WITHOUT_NORMS | _SPECFORGE_STEPS, "nothing"),
    "speculators without norms": Recipe(_SPECULATORS, WITHOUT_NORMS | _SPECULATORS_STEPS, "head"),
    "specforge, our rate": Recipe(
        {**_SPECFORGE, "learning_rate": 1e-3}, WITHOUT_NORMS | _SPECFORGE_STEPS, "nothing"
    ),
}
LEVERS = {
    "without norms": Recipe(OURS, WITHOUT_NORMS),
    "fc_norm alone": _shape(norm_output=False),
    "norm_output alone": _shape(fc_norm=False),
    "adamw": Recipe(ADAMW),
    "adamw without norms": Recipe(ADAMW, WITHOUT_NORMS),
    "lr 1e-3": _ours(learning_rate=1e-3),
    "lr 4e-3": _ours(learning_rate=4e-3),
    "lr 8e-3": _ours(learning_rate=8e-3),
    "hybrid loss": _shape(loss="hybrid"),
    "lk loss": _shape(loss="lk"),
    "all from scratch": Recipe(OURS, start="nothing"),
    "frozen head": _ours(train_head=False),
    "aux 2, 15, 29": _aux(2, 15, 29),
    "aux 15, 22, 27": _aux(15, 22, 27),
    "aux 2, 8, 15, 22, 29": _aux(2, 8, 15, 22, 29),
    "aux 29": _aux(29),
    "step decay 1": _shape(ttt_step_loss_decay=1.0),
    "step decay 0.6": _shape(ttt_step_loss_decay=0.6),
    "S 4": _shape(ttt_steps=4),
    "W 8192": _shape(vocab_size=8192),
    "W full": _shape(vocab_size=None),
    "average 0.99": _ours(ema_decay=0.99),
    "clip 2": _ours(max_grad_norm=2.0),
    "weight decay 0.1": _ours(weight_decay=0.1),
    "mlp 3072": _shape(intermediate_size=3072),
    "mlp 768": _shape(intermediate_size=768),
    "steps of 2048 tokens": _ours(batch_tokens=2048),
    "data 1/2": Recipe(OURS, data_share=1 / 2),
    "data 1/4": Recipe(OURS, data_share=1 / 4),
    "data 1/8": Recipe(OURS, data_share=1 / 8),
    "stored answers": Recipe(OURS, stored=True),
}
RECIPES = {**BASELINES, "ours": _ours(), **LEVERS}
