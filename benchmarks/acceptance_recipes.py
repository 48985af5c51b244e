"""The recipes that benchmarks/acceptance.py compares: two peers', ours, and ours with one lever moved."""

from dataclasses import dataclass, field
from typing import Any, Literal

OURS: dict[str, Any] = {"learning_rate": 2e-3}
NORMS: dict[str, Any] = {"fc_norm": True, "norm_output": True}
Part = Literal["head", "layer", "fc", "scale"]


@dataclass(frozen=True)
class Recipe:
    """Differences from the code's own defaults.

    start: what starts from the target, not from noise or 1: "head" (and final norm), "layer" (its last), "fc"
    (passes its states through), "scale" (with fc_norm, what the layer adds is made as small as what passes).
    data_share: share of the training answers, repeated so that the number of steps stays.
    stored: train on the data set's answers instead of the target's own, repeated likewise.
    """

    train: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)
    start: tuple[Part, ...] = ("head", "layer", "fc", "scale")
    aux_layer_ids: tuple[int, ...] | None = None
    data_share: float = 1.0
    stored: bool = False


def _ours(**train: Any) -> Recipe:
    return Recipe({**OURS, **train}, NORMS)


def _shape(**draft: Any) -> Recipe:
    return Recipe(OURS, {**NORMS, **draft})


def _start(*parts: Part) -> Recipe:
    return Recipe(OURS, NORMS, parts)


def _scratch(**train: Any) -> Recipe:
    return Recipe({**OURS, **train}, NORMS, ("head",))


def _aux(*layer_ids: int) -> Recipe:
    return Recipe(OURS, NORMS, aux_layer_ids=layer_ids)


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
    "specforge": Recipe(_SPECFORGE, start=()),
    "speculators": Recipe(_SPECULATORS, start=("head",)),
    "specforge, our rate": Recipe({**_SPECFORGE, "learning_rate": 1e-3}, start=()),
}
LEVERS = {
    "without norms": Recipe(OURS),
    "without norms, lr 1e-3": Recipe({"learning_rate": 1e-3}),
    "fc_norm alone": Recipe(OURS, {"fc_norm": True}),
    "norm_output alone": Recipe(OURS, {"norm_output": True}),
    "lr 1e-3": _ours(learning_rate=1e-3),
    "lr 4e-3": _ours(learning_rate=4e-3),
    "hybrid loss": _ours(loss="hybrid"),
    "lk loss": _ours(loss="lk"),
    "muon": _ours(optimizer="muon"),
    "layer and fc from scratch": _start("head"),
    "layer from scratch": _start("head", "fc"),
    "layer at the target's scale": _start("head", "layer", "fc"),
    "all from scratch": _start(),
    "frozen head": _ours(train_head=False),
    "aux 2, 15, 29": _aux(2, 15, 29),
    "aux 15, 22, 27": _aux(15, 22, 27),
    "aux 2, 8, 15, 22, 29": _aux(2, 8, 15, 22, 29),
    "aux 29": _aux(29),
    "step decay 1": _ours(step_decay=1.0),
    "step decay 0.6": _ours(step_decay=0.6),
    "K 4": _ours(num_unroll_steps=4),
    "W 8192": _shape(vocab_size=8192),
    "W full": _shape(vocab_size=None),
    "average 0.99": _ours(average_decay=0.99),
    "clip 2": _ours(max_grad_norm=2.0),
    "second moment 0.999": _ours(betas=(0.9, 0.999)),
    "weight decay 0.1": _ours(weight_decay=0.1),
    "mlp 3072": _shape(intermediate_size=3072),
    "mlp 768": _shape(intermediate_size=768),
    "steps of 2048 tokens": _ours(batch_tokens=2048),
    "data 1/2": Recipe(OURS, NORMS, data_share=1 / 2),
    "data 1/4": Recipe(OURS, NORMS, data_share=1 / 4),
    "data 1/8": Recipe(OURS, NORMS, data_share=1 / 8),
    "stored answers": Recipe(OURS, NORMS, stored=True),
    "scratch, muon": _scratch(optimizer="muon"),
    "scratch, decay 0.6": _scratch(step_decay=0.6),
    "scratch, muon, decay 0.6": _scratch(optimizer="muon", step_decay=0.6),
    "scratch, muon, decay 0.6, five aux layers": Recipe(
        {**OURS, "optimizer": "muon", "step_decay": 0.6}, NORMS, ("head",), (2, 8, 15, 22, 29)
    ),
    "scratch, K 4, decay 0.6": _scratch(num_unroll_steps=4, step_decay=0.6),
    "scratch, steps of 2048 tokens": _scratch(batch_tokens=2048),
    "scratch, lr 4e-3": _scratch(learning_rate=4e-3),
}
RECIPES = {**BASELINES, "ours": _ours(), **LEVERS}
