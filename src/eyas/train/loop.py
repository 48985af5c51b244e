"""The training loop: load, step, every so often validate and save."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from eyas.config.schema import MACHINE_SETTINGS, DraftSettings, TrainSettings
from eyas.data.pack import pack
from eyas.drafters.base import Draft, Drafter
from eyas.drafters.common.acceptance import Acceptance
from eyas.drafters.common.batch import PackedBatch, lay_out
from eyas.errors import ContractError
from eyas.files import atomic_file, fingerprint
from eyas.progress import Progress, say
from eyas.store.base import StateReader
from eyas.targets.teacher import TeacherHead
from eyas.train.checkpoint import (
    Checkpoint,
    State,
    checkpoint_folder,
    latest_checkpoint,
    load_optimizers,
    load_weights,
    mark_best,
    prune,
    read_checkpoint,
    remove_all,
    save_checkpoint,
)
from eyas.train.ema import WeightEMA
from eyas.train.grad_accumulation import add_up_in_slices, add_up_whole
from eyas.train.learning_rate import with_peak_rate
from eyas.train.optim import Stepper, make_optimizers
from eyas.train.precision import compute_dtype
from eyas.train.prefetch import Windows, feed, whole
from eyas.train.ranks import Ranks
from eyas.train.sharded_params import ShardedParams, check_sharding
from eyas.train.step_plan import MicroBatch, StepPlan
from eyas.train.validation import measure_acceptance
from eyas.types import VocabMap

# Steps between two looks at the device: metrics are read and losses checked together.
_READ_EVERY = 10
# Steps in a row without a finite loss and gradient after which the run stops.
_MAX_SKIPPED = 3


@dataclass(frozen=True)
class _Queued:
    """A step whose numbers are still on the device: the packed sums, then norm, rate and taken."""

    step: int
    values: torch.Tensor


@dataclass
class Trainer:
    """Trains one draft, on one device or with other ranks on one each.

    ``draft_settings`` are those of the draft's kind. ``root`` is the folder of its checkpoints and metrics,
    the
    same for all ranks; the first one writes there.
    """

    drafter: Drafter
    draft: Draft
    draft_settings: DraftSettings
    teacher: TeacherHead
    vocab: VocabMap
    train_states: StateReader
    held_out_states: StateReader
    settings: TrainSettings
    seed: int
    root: Path
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    windows: Windows = whole  # in which train_states can be read
    history: list[dict[str, Any]] = field(default_factory=list)
    watch: Callable[[dict[str, Any]], None] = lambda row: None  # told each new row, on the first rank

    def __post_init__(self) -> None:
        continued = self.draft_settings.init_from is not None
        self.settings = with_peak_rate(self.settings, self.draft.config.hidden_size, continued)
        self.dtype = compute_dtype(self.settings, self.device)
        self.teacher = self.teacher.to(self.device, self.dtype)
        if self.device.type == "cuda" and not self.draft.config.has_own_embedding:
            # One embedding on the card, in the compute dtype; it is frozen, so nothing is lost.
            self.draft.embed_tokens.weight = torch.nn.Parameter(self.teacher.embedding, requires_grad=False)
        self.slices: ShardedParams | None = None
        check_sharding(self.settings)
        if self.settings.shard and self.ranks.size == 1:
            say("train: train.shard does nothing for one process; set train.num_gpus")
        elif self.settings.shard:
            frozen = () if self.settings.train_head else self.drafter.heads
            self.slices = ShardedParams(self.draft, self.dtype, self.device, frozen)
        assert isinstance(self.draft, torch.nn.Module)
        self.draft.to(self.device)
        # The weights that the optimizers step: the draft's own, or this rank's slices of them.
        self.masters = self.slices.masters if self.slices else self.draft.trainable()
        self.target_ids = torch.from_numpy(self.vocab.target_ids).to(self.device)
        self.objective = self.drafter.objective(
            self.draft,
            self.teacher,
            self.target_ids,
            self.draft_settings,
            self.settings,
            self.dtype,
            self.device,
            sharded=self.slices is not None,
        )
        if self.slices:
            self.objective.hand_over_to(self.slices.add)
        elif self.ranks.size > 1:
            self.objective.hand_over_to(lambda name, gradient: self.ranks.start_adding_up(gradient))
        cost_of = partial(self.drafter.cost_of, settings=self.draft_settings)
        plan = StepPlan.of(self.train_states, cost_of, self.settings, self.seed, self.ranks.size)
        # One entry for each step of the optimizer: its batches, and those that this rank computes.
        self.batches = plan.steps
        self.share = [shares[self.ranks.rank] for shares in plan.shares]
        adamw, muon = make_optimizers(self.masters, self.settings, self.drafter.heads, self.drafter.tables)
        self.optimizers = [adamw, muon] if muon else [adamw]
        owners = self.ranks if self.slices else None
        self.stepper = Stepper(adamw, self.settings, len(self.batches), self.objective.copies, muon, owners)
        decay = self.settings.ema_decay
        self.average = None if decay is None else WeightEMA(self.masters, decay)
        self.settings_fingerprint = fingerprint(
            [
                self.settings.model_dump(mode="json", exclude=MACHINE_SETTINGS),
                self.draft_settings.model_dump(mode="json"),
                self.seed,
                self.vocab.fingerprint,
            ]
        )
        self.best, self.best_step = 0.0, 0
        self.num_skipped = 0  # in a row
        self._queue: list[_Queued] = []

    def run(self, stop_after: int | None = None) -> None:
        """Train from the last checkpoint, or from the start, to the end (or for ``stop_after`` steps)."""
        settings, num_steps = self.settings, len(self.batches)
        first = self._resume()
        last = num_steps if stop_after is None else min(num_steps, first + stop_after)
        windows = self.windows(self.share, first, last)
        coming = feed(partial(self._load, self.train_states), windows, self.device)
        with Progress("train", num_steps - first, "steps") as progress, closing(coming):
            for step in range(first, last):
                self._step(step, islice(coming, len(self.share[step])), len(self.share[step]))

                done = step + 1
                validating = done % settings.validate_every == 0 or done == num_steps
                saving = done % settings.save_every == 0 or done == last
                if validating or saving or done % _READ_EVERY == 0:
                    self._read()
                if validating or saving:
                    with self.averaged():
                        if validating:
                            self._validate(done)
                        if saving:
                            self._save(done)
                progress.advance(1, self._latest())

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the draft be the averaged one, where an average is kept."""
        if self.average is None:
            yield
            return
        with self.average.in_place():
            self._refresh()
            yield
        self._refresh()

    def _refresh(self) -> None:
        """Let the objective read the weights, which something other than the optimizer changed."""
        if self.slices:
            self.slices.publish()
        else:
            self.objective.refresh()

    def validate(self) -> tuple[list[float], Acceptance]:
        """Measure loss and acceptance on the held-out states; every rank gets the figures of all."""
        return measure_acceptance(
            self.objective,
            self._held_out_batches(),
            self.settings.validate_draft_tokens,
            self.ranks,
            self.device,
        )

    def _step(self, step: int, batches: Iterable[PackedBatch], num_batches: int) -> None:
        """Add up the gradients of the micro-batches and step; nothing waits for the device."""
        sums = [torch.zeros(self.objective.num_sums, dtype=torch.float64, device=self.device)]
        if self.slices:
            num_rounds = -(-len(self.batches[step]) // self.ranks.size)
            sums += add_up_in_slices(self.objective, self.slices, batches, num_rounds)
        else:
            sums += add_up_whole(self.objective, batches, num_batches)
        total = torch.stack(sums).sum(0)
        self.ranks.add_up(total)
        self.ranks.finish_adding_up()
        outcome = self.stepper.step(total[0], total[-1])
        if self.slices:
            self.slices.publish(only_stepped=True)
        if self.average:
            self.average.update(step)
        facts = torch.stack([outcome.grad_norm.double(), outcome.rate.double(), outcome.taken.double()])
        self._queue.append(_Queued(step, torch.cat([total, facts])))

    def _read(self) -> None:
        """Log the steps queued on the device.

        Raises: ContractError when too many steps in a row were not taken.
        """
        if not self._queue:
            return
        queued, self._queue = self._queue, []
        for one, values in zip(queued, torch.stack([q.values for q in queued]).tolist(), strict=True):
            *sums, grad_norm, rate, taken = values
            row = {"step": one.step + 1, "learning_rate": rate, "grad_norm": grad_norm}
            if taken:
                self.num_skipped = 0
                self._log(row | self.objective.ratios(sums))
                continue
            self.num_skipped += 1
            indices = chain.from_iterable(self.batches[one.step])
            sample_ids = [self.train_states.sample(i).sample_id for i in indices]
            names = ", ".join(sample_ids)
            say(f"train: step {one.step + 1} not taken: loss or gradient not finite; samples {names}")
            self._log({"step": one.step + 1, "taken": False, "sample_ids": sample_ids})
            if self.num_skipped >= _MAX_SKIPPED:
                raise ContractError(
                    f"the loss or gradient was not finite in {self.num_skipped} steps in a row, the last one "
                    f"with samples {names}",
                    hint="lower train.learning_rate, or look at these samples' states; "
                    "the last checkpoint is intact",
                )

    def _latest(self) -> str:
        losses = [row["loss"] for row in self.history[-1:] if "loss" in row]
        return f"loss {losses[0]:.3f}" if losses else ""

    def _load(self, states: StateReader, batch: MicroBatch) -> PackedBatch:
        planner = partial(self.drafter.plan, settings=self.draft_settings, draw=batch.draw)
        pinned = self.device.type == "cuda"
        return lay_out([states.read(i) for i in batch], planner, self.dtype, pinned)

    def _held_out_batches(self) -> Iterator[PackedBatch]:
        groups = pack(self.held_out_states.lengths, self.settings.batch_tokens, seed=0)
        batches = [MicroBatch(tuple(group), number) for number, group in enumerate(groups)]
        own = batches[self.ranks.rank :: self.ranks.size]
        return feed(partial(self._load, self.held_out_states), [own], self.device)

    def _validate(self, step: int) -> None:
        sums, acceptance = self.validate()
        self._log(
            {
                "step": step,
                "validation": True,
                "acceptance_length": acceptance.length,
                "acceptance_rates": acceptance.rates,
                **self.objective.ratios(sums),
            }
        )
        if acceptance.length > self.best:
            self.best, self.best_step = acceptance.length, step
            self._save(step)

    def _save(self, step: int) -> None:
        folder = checkpoint_folder(self.root, step)
        # Saved a moment ago as the best it stays: replacing it would leave none for an instant.
        if self.ranks.on_first(folder.exists):
            return
        masters = self.average.masters if self.average else {}
        join = self.slices.join_on_first if self.slices else None
        take = partial(State.of, self.masters, self.optimizers, masters, join)
        state = take() if self.slices else None  # every rank gives its slices
        self.ranks.on_first(lambda: self._write_checkpoint(step, state or take()))

    def _write_checkpoint(self, step: int, state: State) -> None:
        checkpoint = Checkpoint(
            folder=checkpoint_folder(self.root, step),
            step=step,
            num_steps=len(self.batches),
            spec=self.train_states.spec,
            architecture=self.drafter.name,
            draft_config=self.draft.config,
            vocab=self.vocab,
            data_fingerprint=self.train_states.fingerprint,
            settings_fingerprint=self.settings_fingerprint,
            metrics={
                "best": self.best,
                "best_step": self.best_step,
                "history": self.history,
                "num_taken": int(self.stepper.num_taken),
                "num_skipped": self.num_skipped,
            },
        )
        save_checkpoint(checkpoint, state)
        if self.best_step == step:
            mark_best(self.root, step)
        prune(self.root)

    def _resume(self) -> int:
        self._refresh()
        folder = self.ranks.on_first(lambda: latest_checkpoint(self.root))
        if folder is None:
            self._write_metrics()
            return 0
        checkpoint = read_checkpoint(folder)
        best_step = checkpoint.metrics["best_step"]
        best = checkpoint_folder(self.root, best_step)
        if best_step and self.ranks.on_first(lambda: not best.is_dir()):
            say(f"train: the best checkpoint (step {best_step}) is gone; training starts over to make it")
            self.ranks.on_first(lambda: remove_all(self.root))
            return self._resume()
        if (checkpoint.settings_fingerprint, checkpoint.data_fingerprint) != (
            self.settings_fingerprint,
            self.train_states.fingerprint,
        ):
            raise ContractError(
                f"{folder} was trained with other settings or other states",
                hint="start over with --fresh, or name another run_dir",
            )
        cut = (self.slices.cut,) if self.slices else ()
        load_weights(checkpoint, self.draft, self.masters, *cut)
        if self.average:
            self.average.restart()
        load_optimizers(checkpoint, self.masters, self.optimizers, *cut)
        self._refresh()
        self.stepper.num_taken.fill_(checkpoint.metrics["num_taken"])
        self.num_skipped = checkpoint.metrics["num_skipped"]
        self.history = list(checkpoint.metrics["history"])
        self.best, self.best_step = checkpoint.metrics["best"], checkpoint.metrics["best_step"]
        if self.ranks.is_first:
            # The interruption may have come between saving this checkpoint, marking it and removing others.
            if self.best_step == checkpoint.step:
                mark_best(self.root, checkpoint.step)
            prune(self.root)
        self._write_metrics()
        return checkpoint.step

    def _write_metrics(self) -> None:
        """Take back the lines of steps that will be done again."""
        if not self.ranks.is_first:
            return
        with atomic_file(self.root / "metrics.jsonl") as beside:
            beside.write_text("".join(json.dumps(row) + "\n" for row in self.history), encoding="utf-8")

    def _log(self, row: dict[str, Any]) -> None:
        self.history.append(row)
        if not self.ranks.is_first:
            return
        self.watch(row)
        with (self.root / "metrics.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")
