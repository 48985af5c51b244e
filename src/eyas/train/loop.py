"""The training loop: load, step, every so often validate and save."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas.config.schema import TrainSettings
from eyas.data.pack import pack
from eyas.draft.eagle3 import Eagle3Draft
from eyas.errors import ContractError
from eyas.files import fingerprint
from eyas.progress import Progress
from eyas.store.base import StateReader
from eyas.targets.teacher import TeacherHead
from eyas.train.batch import PackedBatch, pack_batch
from eyas.train.checkpoint import (
    Checkpoint,
    checkpoint_folder,
    latest_checkpoint,
    load_optimizer,
    load_weights,
    mark_best,
    prune,
    read_checkpoint,
    save_checkpoint,
)
from eyas.train.metrics import Acceptance, StepSums, replay_answers
from eyas.train.optim import learning_rate, make_optimizer
from eyas.train.unroll import run_unroll
from eyas.types import VocabMap


@dataclass
class Trainer:
    """Trains one draft on one device. ``root`` is the folder of its checkpoints and metrics."""

    draft: Eagle3Draft
    teacher: TeacherHead
    vocab: VocabMap
    train_states: StateReader
    held_out_states: StateReader
    settings: TrainSettings
    seed: int
    num_draft_tokens: int  # K at which acceptance is validated
    root: Path
    device: torch.device
    history: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dtype = getattr(torch, self.settings.compute_dtype)
        self.draft.to(self.device)
        self.teacher = self.teacher.to(self.device, self.dtype)
        self.target_ids = torch.from_numpy(self.vocab.target_ids).to(self.device)
        self.optimizer = make_optimizer(self.draft, self.settings)
        self.batches = [
            batch
            for epoch in range(self.settings.num_epochs)
            for batch in pack(self.train_states.lengths, self.settings.batch_tokens, self.seed + epoch)
        ]
        self.settings_fingerprint = fingerprint(
            [self.settings.model_dump(mode="json", exclude={"device"}), self.seed, self.vocab.fingerprint]
        )
        self.best, self.best_step = 0.0, 0

    def run(self, stop_after: int | None = None) -> None:
        """Train from the last checkpoint, or from the start, to the end (or for ``stop_after`` steps)."""
        settings, num_steps = self.settings, len(self.batches)
        first = self._resume()
        last = num_steps if stop_after is None else min(num_steps, first + stop_after)
        with Progress("train", num_steps - first, "steps") as progress:
            for step in range(first, last):
                batch = self._load(self.train_states, self.batches[step])
                rate = learning_rate(step, num_steps, settings)
                sums, grad_norm = self._step(batch, rate)
                self._log({"step": step + 1, "learning_rate": rate, "grad_norm": grad_norm, **sums.ratios()})

                done = step + 1
                if done % settings.validate_every == 0 or done == num_steps:
                    self._validate(done)
                if done % settings.save_every == 0 or done == last:
                    self._save(done)
                progress.advance(1, f"loss {sums.ratios()['loss']:.3f}")

    def validate(self) -> tuple[StepSums, Acceptance]:
        """Measure loss and acceptance on the held-out states."""
        sums: StepSums | None = None
        acceptance = Acceptance.empty(self.num_draft_tokens)
        with torch.no_grad():
            for batch in self._held_out_batches():
                result = self._unroll(batch)
                one = StepSums.of(result)
                sums = one if sums is None else sums + one
                rows = batch.plan.rows[0]
                for one_answer in replay_answers(rows, result.accepted, result.depth, self.num_draft_tokens):
                    acceptance += one_answer
        assert sums is not None
        return sums, acceptance

    def _step(self, batch: PackedBatch, rate: float) -> tuple[StepSums, float]:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        result = self._unroll(batch)
        (result.loss / max(1, result.num_supervised)).backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(
            self.draft.trainable().values(), self.settings.max_grad_norm
        )
        if not torch.isfinite(grad_norm):
            raise ContractError(
                f"the gradient is not finite in the batch of samples {', '.join(batch.sample_ids[:8])}",
                hint="lower train.learning_rate, or look at these samples' states",
            )
        self.optimizer.step()
        return StepSums.of(result), float(grad_norm)

    def _unroll(self, batch: PackedBatch) -> Any:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return run_unroll(self.draft, self.teacher, self.target_ids, batch, self.settings.step_decay)

    def _load(self, states: StateReader, indices: Sequence[int]) -> PackedBatch:
        num_steps = self.settings.num_unroll_steps
        return pack_batch([states.read(i) for i in indices], num_steps, self.device, self.dtype)

    def _held_out_batches(self) -> Iterator[PackedBatch]:
        for indices in pack(self.held_out_states.lengths, self.settings.batch_tokens, seed=0):
            yield self._load(self.held_out_states, indices)

    def _validate(self, step: int) -> None:
        sums, acceptance = self.validate()
        self._log(
            {
                "step": step,
                "validation": True,
                "acceptance_length": acceptance.length,
                "acceptance_rates": acceptance.rates,
                **sums.ratios(),
            }
        )
        if acceptance.length > self.best:
            self.best, self.best_step = acceptance.length, step
            folder = self._save(step)
            mark_best(self.root, folder)

    def _save(self, step: int) -> Path:
        folder = checkpoint_folder(self.root, step)
        checkpoint = Checkpoint(
            folder=folder,
            step=step,
            num_steps=len(self.batches),
            spec=self.train_states.spec,
            draft_config=self.draft.config,
            vocab=self.vocab,
            data_fingerprint=self.train_states.fingerprint,
            settings_fingerprint=self.settings_fingerprint,
            metrics={"best": self.best, "best_step": self.best_step, "history": self.history},
        )
        save_checkpoint(checkpoint, self.draft, self.optimizer)
        prune(self.root)
        return folder

    def _resume(self) -> int:
        folder = latest_checkpoint(self.root)
        if folder is None:
            return 0
        checkpoint = read_checkpoint(folder)
        if (checkpoint.settings_fingerprint, checkpoint.data_fingerprint) != (
            self.settings_fingerprint,
            self.train_states.fingerprint,
        ):
            raise ContractError(
                f"{folder} was trained with other settings or other states",
                hint="start over with --fresh, or name another run_dir",
            )
        load_weights(checkpoint, self.draft)
        load_optimizer(checkpoint, self.draft, self.optimizer)
        self.history = list(checkpoint.metrics["history"])
        self.best, self.best_step = checkpoint.metrics["best"], checkpoint.metrics["best_step"]
        if self.best_step == checkpoint.step:
            # The interruption may have come between saving this checkpoint and marking it.
            mark_best(self.root, folder)
        return checkpoint.step

    def _log(self, row: dict[str, Any]) -> None:
        self.history.append(row)
        with (self.root / "metrics.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")
