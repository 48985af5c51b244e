"""AdamW and Muon in fp32 with warm-up and cosine decay; on the fast path a step stays on the device."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from eyas.config.schema import TrainSettings
from eyas.train.learning_rate import learning_rate
from eyas.train.ranks import Ranks


@dataclass(frozen=True)
class StepOutcome:
    """Device scalars: the gradient's norm before clipping, the rate used, and whether the step was taken."""

    grad_norm: torch.Tensor
    rate: torch.Tensor
    taken: torch.Tensor


class Stepper:
    """Steps the optimizers with summed gradients, or leaves everything as it is when they are not finite.

    ``num_taken`` counts the steps taken; the learning rate advances only with it. ``copies`` are the fast
    path's, by parameter: with them, kernels of our own update and copy in one pass. Without, torch's Muon
    takes its rate from the host, so every step waits for the device once. ``owners`` are the ranks among
    which the parameters are cut, where they are.
    """

    def __init__(
        self,
        adamw: torch.optim.AdamW,
        settings: TrainSettings,
        num_steps: int,
        copies: Mapping[torch.Tensor, torch.Tensor] | None = None,
        muon: torch.optim.Muon | None = None,
        owners: Ranks | None = None,
    ) -> None:
        self.adamw, self.muon = adamw, muon
        self.owners = owners or Ranks()
        self.copies = copies
        groups = adamw.param_groups + (muon.param_groups if muon else [])
        self.parameters = [p for group in groups for p in group["params"]]
        self.max_grad_norm = settings.max_grad_norm
        device = self.parameters[0].device
        rates = [learning_rate(step, num_steps, settings) for step in range(num_steps)]
        self.rates = torch.tensor(rates, dtype=torch.float32, device=device)
        self.num_taken = torch.zeros(1, dtype=torch.long, device=device)

    @torch.no_grad()
    def step(self, loss: torch.Tensor, num_rows: torch.Tensor) -> StepOutcome:
        """Divide the gradients by ``num_rows``, clip them and step, if they and ``loss`` are finite.

        All are sums over the whole step, on every rank the same, and so is what is done.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        # A batch without a row has gradients of zero.
        num_rows = num_rows.float().clamp(min=1)
        square = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).double().square()
        self.owners.add_up(square)
        norm = square.sqrt().float() / num_rows
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        rate = self.rates.index_select(0, self.num_taken).squeeze(0)  # rates[num_taken] would wait
        divisor = num_rows * (norm / self.max_grad_norm).clamp(min=1)
        if self.copies is None:
            self._update(rate, divisor, finite)
            if self.muon is not None and finite:
                self._update_by_muon(self.muon, float(rate), divisor)
        else:
            self._update_and_copy(rate, divisor, finite, self.copies)
            if self.muon is not None:
                self._update_and_copy_by_muon(self.muon, rate, divisor, finite, self.copies)
        self.num_taken += finite
        return StepOutcome(norm, rate, finite)

    def _update(self, rate: torch.Tensor, divisor: torch.Tensor, finite: torch.Tensor) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = rate
        # The fused kernel divides by grad_scale and does nothing where found_inf is 1.
        self.adamw.grad_scale = divisor  # type: ignore[attr-defined]
        self.adamw.found_inf = (~finite).float()  # type: ignore[attr-defined]
        self.adamw.step()

    def _update_by_muon(self, muon: torch.optim.Muon, rate: float, divisor: torch.Tensor) -> None:
        for group in muon.param_groups:
            group["lr"] = rate
            torch._foreach_div_([p.grad for p in group["params"]], divisor)
        muon.step()

    def _update_and_copy(
        self,
        rate: torch.Tensor,
        divisor: torch.Tensor,
        finite: torch.Tensor,
        copies: Mapping[torch.Tensor, torch.Tensor],
    ) -> None:
        """Do what ``_update`` does, on torch's own optimizer state, and refresh the compute copies."""
        from eyas.kernels.adamw_kernel import adamw

        betas = self.adamw.defaults["betas"]
        step = self.num_taken.double() + 1
        shares = torch.cat([1 - beta**step for beta in betas]).float()
        for group in self.adamw.param_groups:
            for parameter in group["params"]:
                state = self.adamw.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=parameter.device)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += finite
                adamw(
                    parameter,
                    parameter.grad,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    copies.get(parameter),
                    rate,
                    divisor,
                    shares,
                    finite,
                    betas,
                    group["eps"],
                    group["weight_decay"],
                )

    def _update_and_copy_by_muon(
        self,
        muon: torch.optim.Muon,
        rate: torch.Tensor,
        divisor: torch.Tensor,
        finite: torch.Tensor,
        copies: Mapping[torch.Tensor, torch.Tensor],
    ) -> None:
        from eyas.kernels.muon_kernel import muon as update

        for group in muon.param_groups:
            for parameter in group["params"]:
                state = muon.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                update(
                    parameter,
                    parameter.grad,
                    state["momentum_buffer"],
                    copies[parameter],
                    rate,
                    divisor,
                    finite,
                    group,
                )


def make_optimizers(
    parameters: Mapping[str, torch.nn.Parameter],
    settings: TrainSettings,
    heads: Collection[str],
    tables: Collection[str],
) -> tuple[torch.optim.AdamW, torch.optim.Muon | None]:
    """Return the optimizers that share a draft's trainable parameters, given by name; only matrices decay.

    Muon takes the matrices that are neither ``heads`` nor ``tables`` (names that the draft's kind gives),
    where it is asked for, with updates of AdamW's size so that one rate fits both.
    """
    trainable = dict(parameters)
    assert all(p.dtype == torch.float32 for p in trainable.values()), "master weights are fp32"
    head_rows = [trainable.pop(name) for name in sorted(heads) if name in trainable]
    matrices = [p for name, p in trainable.items() if suits_muon(name, p, tables)]
    others = [p for name, p in trainable.items() if p.ndim == 2 and not suits_muon(name, p, tables)]
    vectors = [p for p in trainable.values() if p.ndim != 2]
    muon = None
    if settings.optimizer == "muon":
        muon = torch.optim.Muon(
            matrices,
            lr=float(settings.learning_rate),
            weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        matrices = []
    matrices = [*matrices, *others, *(head_rows if settings.train_head else [])]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=float(settings.learning_rate), betas=settings.betas, fused=True)
    return adamw, muon


def suits_muon(name: str, parameter: torch.Tensor, tables: Collection[str]) -> bool:
    """Whether Muon may take a parameter: a matrix that is not among the heads and tables of tokens."""
    return parameter.ndim == 2 and name not in tables
