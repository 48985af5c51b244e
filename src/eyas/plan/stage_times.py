"""What each stage of a run has to do, and how long it takes at the best known rate."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.config.schema import RunConfig
from eyas.errors import UserError, did_you_mean
from eyas.plan.estimates import Tokens
from eyas.plan.measure_rates import VALIDATION_COST, MeasuredRates, Rows
from eyas.progress_displays import duration
from eyas.run_folder import read_record

UNITS = {"prepare": "rows", "regenerate": "answered tokens", "extract": "tokens", "train": "tokens",
          "evaluate": "prompts"}  # fmt: skip


@dataclass(frozen=True)
class StagePlan:
    """``seconds`` is None where nothing tells it; ``basis`` says where it comes from."""

    stage: str
    state: str
    work: str
    seconds: float | None
    basis: str


@dataclass(frozen=True)
class Rates:
    """Units a second of stages, by where they are known from; the first that knows one is believed."""

    given: Mapping[str, float]
    earlier: Mapping[str, tuple[float, str]]
    measured: MeasuredRates | None

    def of(self, stage: str) -> tuple[float, str] | None:
        """Return a stage's rate and its basis."""
        unit = UNITS[stage]
        if stage in self.given:
            return self.given[stage], f"given: {self.given[stage]:,.0f} {unit}/s"
        if stage in self.earlier:
            rate, where = self.earlier[stage]
            return rate, f"{rate:,.4g} {unit}/s in {where}"
        if self.measured and stage in self.measured.rates:
            rate = self.measured.rates[stage]
            return rate, f"calibrated: {rate:,.4g} {unit}/s"
        return None


def given_rates(rates: Sequence[str]) -> dict[str, float]:
    given: dict[str, float] = {}
    for text in rates:
        stage, _, number = text.partition("=")
        if stage not in UNITS:
            raise UserError(
                f"--rate {text}: no stage {stage!r} has a rate{did_you_mean(stage, UNITS)}",
                hint=f"known: {', '.join(UNITS)}; as in --rate extract=2280",
            )
        try:
            given[stage] = float(number)
        except ValueError:
            given[stage] = 0.0
        if not given[stage] > 0:
            raise UserError(f"--rate {text}: {number!r} is no rate", hint="as in --rate extract=2280")
    return given


def works_of(
    config: RunConfig, tokens: Tokens, rows: Rows | None, measured: MeasuredRates | None
) -> dict[str, float]:
    """Return each stage's amount of work in the unit of its rate."""
    train = config.train
    epochs = train.num_epochs
    steps = epochs * tokens.train / (train.batch_tokens * train.batches_per_step)
    validations = max(1.0, steps / train.validate_every)
    return {
        "prepare": rows.total if rows else tokens.conversations,
        "regenerate": tokens.total * tokens.supervised_share,
        "extract": tokens.held_out if train.source == "stream" else tokens.total,
        "train": epochs * tokens.train + validations * VALIDATION_COST * tokens.held_out,
        "evaluate": config.evaluate.num_prompts,
    }


def stage_plan(folder: Path, stage: str, state: str, work: float | None, rates: Rates) -> StagePlan:
    """Return how long a stage takes that writes to ``folder``; ``work`` is None where it is not counted."""
    unit = UNITS.get(stage, "")
    text = f"{work:,.0f} {unit}" if work is not None else ""
    if state == "done":
        took = (read_record(folder) or {}).get("seconds")
        return StagePlan(stage, state, text, 0.0, f"took {duration(took)}" if took else "is there")
    measured = rates.measured
    fixed = measured.fixed_s.get(stage, 0.0) if measured else 0.0
    if work is None:
        if measured:
            return StagePlan(stage, state, text, fixed, "measured by a calibration")
        return StagePlan(stage, state, text, 60.0, "assumed: a minute")
    left = work * (1 - _share_done(folder, stage))
    known = rates.of(stage)
    if known is None:
        return StagePlan(
            stage, state, text, None, f"unknown: give --rate {stage}=N ({unit}/s), or --calibrate"
        )
    rate, basis = known
    if basis.startswith("calibrated"):
        return StagePlan(stage, state, text, left / rate + fixed, f"{basis}, and {fixed:.0f} s besides")
    return StagePlan(stage, state, text, left / rate, basis)


def with_captures(
    train: StagePlan, num_tokens: float, rate: tuple[float, str] | None, num_in_turns: int
) -> StagePlan:
    """Return the plan of training in turns with engines, one a rank, or (0) while a fleet of them works."""
    if train.state == "done":
        return train
    work = f"{train.work}, {num_tokens:,.0f} tokens captured"
    if train.seconds is None or rate is None:
        basis = (
            train.basis
            if train.seconds is None
            else "unknown: give --rate extract=N (tokens/s), or --calibrate"
        )
        return dataclasses.replace(train, work=work, seconds=None, basis=basis)
    captures = num_tokens / (rate[0] * max(1, num_in_turns))
    when = "in turns with it" if num_in_turns else "while it works"
    by = f" by {num_in_turns} engines, each" if num_in_turns > 1 else ","
    basis = f"{train.basis}; captures {when}{by} {rate[1]}"
    seconds = train.seconds + captures if num_in_turns else max(train.seconds, captures)
    return dataclasses.replace(train, work=work, seconds=seconds, basis=basis)


def _share_done(folder: Path, stage: str) -> float:
    """Return how much of an interrupted stage is kept, where its journal tells."""
    if stage == "extract":
        from eyas.store.journal import read_journal
        from eyas.store.manifest import StoreManifest

        done = total = 0
        for manifest in folder.glob("*/manifest.json"):
            done += len(read_journal(manifest.parent, strict=False))
            total += StoreManifest.read(manifest.parent).num_shards
        return done / total if total else 0.0
    if stage == "train":
        from eyas.train.checkpoint import latest_checkpoint, read_checkpoint

        latest = latest_checkpoint(folder)
        if latest is not None:
            checkpoint = read_checkpoint(latest)
            return checkpoint.step / checkpoint.num_steps
    return 0.0
