"""The loss of an EAGLE-3 draft over packed batches, and its sums; by the GPU's kernels where they fit."""

from collections.abc import Mapping, Sequence

import torch

from eyas.config.schema import TrainSettings
from eyas.drafters.base import HandOver, Rounds
from eyas.drafters.common.batch import PackedBatch
from eyas.drafters.common.objective import AutogradObjective
from eyas.drafters.common.teacher_targets import teacher_targets
from eyas.drafters.eagle3.fused.unroll import FusedUnroll
from eyas.drafters.eagle3.model import HEADS, Eagle3Draft
from eyas.drafters.eagle3.settings import Settings
from eyas.drafters.eagle3.ttt_rows import RowPlan
from eyas.drafters.eagle3.unroll import UnrollResult, run_unroll
from eyas.progress import say
from eyas.targets.teacher import TeacherHead

Batch = PackedBatch[RowPlan]


def pack_sums(result: UnrollResult) -> torch.Tensor:
    """Put a batch's sums into one fp64 vector [2 + 3 S] on the device, to be added up and read later.

    It holds the weighted loss; for each step the loss, the rows that matched the target at this and all
    earlier steps, and the rows that the step supervises; and the supervised rows.
    """
    steps = torch.arange(len(result.step_loss), device=result.accepted.device)[:, None]
    agreed = (result.accepted[None] > steps).sum(1)
    judged = (result.depth[None] > steps).sum(1)
    num_supervised = judged.new_full((1,), result.num_supervised)
    parts = (result.loss.detach()[None], result.step_loss, agreed, judged, num_supervised)
    return torch.cat([part.double() for part in parts])


def ratios_of(sums: Sequence[float]) -> dict[str, float | list[float]]:
    """Return loss per supervised row and prefix-joint agreement by step, of ``pack_sums``'s vector."""
    num_steps = len(sums) // 3
    agreed, judged = (sums[1 + i * num_steps : 1 + (i + 1) * num_steps] for i in (1, 2))
    return {
        "loss": sums[0] / max(1, sums[-1]),
        "agreement": [a / max(1, j) for a, j in zip(agreed, judged, strict=True)],
    }


class _Sums:
    """What both paths know about their sums."""

    settings: Settings

    @property
    def num_sums(self) -> int:
        return 2 + 3 * self.settings.ttt_steps

    def ratios(self, sums: Sequence[float]) -> dict[str, float | list[float]]:
        return ratios_of(sums)


class PlainObjective(_Sums, AutogradObjective):
    """The unroll in plain torch: any draft, any device."""

    def __init__(
        self,
        draft: Eagle3Draft,
        teacher: TeacherHead,
        target_ids: torch.Tensor,
        settings: Settings,
        train: TrainSettings,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(draft, frozen=frozenset() if train.train_head else HEADS, dtype=dtype, device=device)
        self.draft, self.teacher, self.target_ids = draft, teacher, target_ids
        self.settings, self.recompute = settings, train.recompute

    def backward(self, batch: Batch) -> torch.Tensor:
        result = self._unroll(batch, self.recompute)
        result.loss.backward()
        return pack_sums(result)

    @torch.no_grad()
    def measure(self, batch: Batch, num_draft_tokens: int) -> tuple[torch.Tensor, Rounds]:
        result = self._unroll(batch, recompute=False)
        return pack_sums(result), Rounds(batch.plan.rows[0], result.accepted, result.depth)

    def _unroll(self, batch: Batch, recompute: bool) -> UnrollResult:
        settings = self.settings
        with self.autocast():
            return run_unroll(
                self.draft,
                self.teacher,
                self.target_ids,
                batch,
                settings.ttt_step_loss_decay,
                settings.loss,
                recompute,
            )


class FusedObjective(_Sums):
    """The unroll with its backward pass written out, in the GPU's kernels."""

    def __init__(
        self,
        draft: Eagle3Draft,
        teacher: TeacherHead,
        target_ids: torch.Tensor,
        settings: Settings,
        train: TrainSettings,
        dtype: torch.dtype,
        sharded: bool,
    ) -> None:
        self.teacher, self.target_ids, self.settings = teacher, target_ids, settings
        self.is_full = draft.config.vocab_size == draft.config.target_vocab_size
        self.unroll = FusedUnroll(draft, dtype, train.train_head, train.recompute, sharded)
        self.weights = self.unroll.weights

    @property
    def copies(self) -> Mapping[torch.Tensor, torch.Tensor] | None:
        return None if self.weights.sliced else self.weights.copies

    def hand_over_to(self, take: HandOver) -> None:
        self.weights.hand_over = take

    def start(self) -> None:
        self.weights.start()

    def expect_last(self) -> None:
        self.weights.expect_last()

    def finish(self) -> None:
        self.weights.finish()

    def refresh(self) -> None:
        self.weights.refresh()

    def backward(self, batch: Batch) -> torch.Tensor:
        return pack_sums(self._run(batch, with_gradients=True))

    def measure(self, batch: Batch, num_draft_tokens: int) -> tuple[torch.Tensor, Rounds]:
        result = self._run(batch, with_gradients=False)
        return pack_sums(result), Rounds(batch.plan.rows[0], result.accepted, result.depth)

    def _run(self, batch: Batch, with_gradients: bool) -> UnrollResult:
        settings, ids = self.settings, self.target_ids
        with_coverage = settings.loss != "kl"
        targets = teacher_targets(self.teacher, batch.last, ids, self.is_full, with_coverage)
        return self.unroll.run(
            batch, targets, ids, settings.ttt_step_loss_decay, settings.loss, with_gradients
        )


def make_objective(
    draft: Eagle3Draft,
    teacher: TeacherHead,
    target_ids: torch.Tensor,
    settings: Settings,
    train: TrainSettings,
    dtype: torch.dtype,
    device: torch.device,
    sharded: bool,
) -> PlainObjective | FusedObjective:
    """Return the fast path where it runs: on a GPU whose kernels fit the draft."""
    config = draft.config
    if config.latent_attention is not None:
        say("train: a draft with latent attention takes the plain path")
    elif config.num_layers > 1:
        say(
            f"train: a draft of {config.num_layers} layers takes the plain path; "
            "every row runs all of them but the last"
        )
    elif config.sliding_window is not None and config.sliding_window < settings.ttt_steps:
        say("train: a draft whose window is smaller than draft.ttt_steps takes the plain path")
    elif device.type == "cuda" and not FusedUnroll.fits(draft):
        say("train: the GPU kernels do not fit the draft's shape; the plain path trains it, slower")
    elif device.type == "cuda":
        return FusedObjective(draft, teacher, target_ids, settings, train, dtype, sharded)
    return PlainObjective(draft, teacher, target_ids, settings, train, dtype, device)
