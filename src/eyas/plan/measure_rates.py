"""Rates of this machine, measured by running the real stages on a few of the run's own rows."""

import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from eyas.config.schema import RunConfig
from eyas.data.sources import STDIN, Drop, read_source, source_files
from eyas.errors import UserError
from eyas.progress import Progress, Screen, current_screen, on_screen

_SAMPLE_ROWS = 2048
_READ_S = 20.0
_FEWEST, _MOST = 24, 128  # conversations of the trial run
_PROMPTS = 2
# Of a draft that was trained; the trial's accepts next to nothing, and its decoding is slower for it.
_ACCEPTANCE = 1.5
# A validation does the forward pass of a training step, about a third of it.
VALIDATION_COST = 1 / 3


@dataclass(frozen=True)
class Rows:
    """A random sample of the sources' rows, and how many there are in all."""

    sample: list[Any]
    total: float
    exact: bool


@dataclass
class MeasuredRates:
    """``rates``: rows, answered tokens, tokens, tokens, -, prompts a second of each stage once it runs;
    ``fixed_s``: what each stage takes besides."""

    rates: dict[str, float] = field(default_factory=dict)
    fixed_s: dict[str, float] = field(default_factory=dict)
    kept_share: float = 1.0
    tokens_per_conversation: float = 0.0
    supervised_share: float = 0.0
    seconds: float = 0.0


class _Recorder(Screen):
    """Keeps each finished progress; shows a word of it."""

    def __init__(self) -> None:
        self.finished: dict[str, Progress] = {}
        self.elapsed_s: dict[str, float] = {}
        self._behind = current_screen()

    def say(self, text: str) -> None:
        pass

    def show(self, progress: Progress, final: bool) -> None:
        self._behind.say(f"calibrating: {progress.text(final)}")
        if final:
            self.finished[progress.label] = progress
            self.elapsed_s[progress.label] = progress.elapsed_s


def read_rows(config: RunConfig) -> Rows:
    """Sample the sources' rows; after 20 s the rest is estimated from the files' sizes.

    Raises: UserError for standard input, which can be read only once.
    """
    paths = [path for path, _ in config.data.weighted_sources]
    if STDIN in paths:
        raise UserError(
            "a plan cannot read standard input and leave it for the run", hint="give --tokens NUMBER"
        )
    rng, num, num_bytes = random.Random(config.seed), 0, 0
    sample: list[Any] = []
    deadline = time.monotonic() + _READ_S
    total_bytes = sum(
        f.stat().st_size for path in paths if not path.startswith("hf:") for f in source_files(path)
    )
    for path, weight in config.data.weighted_sources:
        for row in read_source(path):
            if isinstance(row, Drop) or rng.random() > weight:
                continue
            num += 1
            if len(sample) < _SAMPLE_ROWS:
                sample.append(row.value)
            elif (place := rng.randrange(num)) < _SAMPLE_ROWS:
                sample[place] = row.value
            if num % 256 == 0 and time.monotonic() > deadline:
                num_bytes = sum(len(json.dumps(r, default=str)) for r in sample) * num // len(sample)
                return Rows(sample, max(num, num * total_bytes / max(num_bytes, 1)), exact=False)
    return Rows(sample, num, exact=True)


class Trial(Protocol):
    """A run on a few rows; the verb that plans knows how to run its stages."""

    @property
    def stages(self) -> Sequence[str]: ...
    def run(self, stage: str) -> None: ...
    def facts(self, stage: str) -> Mapping[str, Any]:
        """Return the record of a stage that is done."""


def calibrate(config: RunConfig, rows: Rows, new_trial: Callable[[RunConfig], Trial]) -> MeasuredRates:
    """Run every stage on a few rows in a temporary folder; about a minute for a small target."""
    measured, started = MeasuredRates(), time.monotonic()
    regenerating = config.regenerate.enabled
    wanted = min(_MOST, config.regenerate.batch_size) if regenerating else _FEWEST
    number = max(_FEWEST, wanted)
    with tempfile.TemporaryDirectory(prefix="eyas-plan-") as name:
        folder = Path(name)
        whole = new_trial(_of_rows(config, folder / "whole", rows.sample, config.data.validation_fraction))
        _run(whole, ["prepare"], measured)
        counts = whole.facts("prepare")["counts"]
        kept = counts.get("train_conversations", 0) + counts.get("held_out_conversations", 0)
        measured.kept_share = kept / max(1, len(rows.sample))
        _count_tokens(measured, counts, kept)
        few = new_trial(_of_rows(config, folder / "few", rows.sample[:number], validation_fraction=0.2))
        prepare = measured.rates["prepare"], measured.fixed_s["prepare"]
        _run(few, few.stages, measured)
        measured.rates["prepare"], measured.fixed_s["prepare"] = prepare
        if regenerating:
            counts = few.facts("regenerate")["counts"]
            _count_tokens(
                measured, counts, counts["train_conversations"] + counts.get("held_out_conversations", 0)
            )
    measured.seconds = time.monotonic() - started
    return measured


def _of_rows(config: RunConfig, folder: Path, rows: list[Any], validation_fraction: float) -> RunConfig:
    """Return the run's own settings on a few rows in another folder."""
    folder.mkdir()
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")
    data = {"sources": (str(source),), "validation_fraction": validation_fraction, "max_drop_share": 1.0}
    train = {
        "num_epochs": 1,
        "validate_every": 10**9,
        "save_every": 10**9,
        "trackers": (),
        "num_gpus": 1,
        "source": "store",
    }
    return config.model_copy(
        update={
            "run_dir": folder / "run",
            "data": config.data.model_copy(update=data),
            "train": config.train.model_copy(update=train),
            "evaluate": config.evaluate.model_copy(update={"num_prompts": _PROMPTS}),
        }
    )


def _run(trial: Trial, stages: Sequence[str], measured: MeasuredRates) -> None:
    for stage in stages:
        recorder = _Recorder()
        with on_screen(recorder):
            trial.run(stage)
        worked = sum(recorder.elapsed_s.values())
        measured.fixed_s[stage] = max(0.0, trial.facts(stage)["seconds"] - worked)
        if recorder.finished:
            measured.rates[stage] = _amount(trial, stage, recorder) / max(
                recorder.elapsed_s.get(_main_label(stage), worked), 1e-6
            )
    if "evaluate" in measured.rates:
        measured.rates["evaluate"] *= speed_up_once_trained(trial.facts("evaluate")["report"])


def speed_up_once_trained(report: Mapping[str, Any]) -> float:
    """Return how much faster than in the trial of ``report`` a prompt is decoded without and with a draft."""
    acceptance, served = report["acceptance"], report["served"] is not None
    if served or not acceptance or not report["plain_tokens_per_s"] or not report["drafted_tokens_per_s"]:
        return 1.0
    plain, drafted = 1 / report["plain_tokens_per_s"], 1 / report["drafted_tokens_per_s"]
    return float((plain + drafted) / (plain + drafted * min(1.0, acceptance / _ACCEPTANCE)))


def _main_label(stage: str) -> str:
    # Later turns come in smaller batches here than in a long run.
    return {"regenerate": "regenerate, turn 1", "extract": "extract train"}.get(stage, stage)


def _amount(trial: Trial, stage: str, recorder: _Recorder) -> float:
    """Return the work of a stage's main progress in the unit of its rate."""
    main = recorder.finished[_main_label(stage)]
    if stage == "regenerate":
        counts = trial.facts(stage)["counts"]
        answers = sum(p.done for p in recorder.finished.values())
        tokens = counts["train_supervised_tokens"] + counts.get("held_out_supervised_tokens", 0)
        return float(tokens * main.done / max(answers, 1))
    if stage == "train":
        counts = trial.facts("regenerate" if "regenerate" in trial.stages else "prepare")["counts"]
        return float(counts["train_tokens"] + VALIDATION_COST * counts.get("held_out_tokens", 0))
    return float(main.done)


def _count_tokens(measured: MeasuredRates, counts: Mapping[str, int], conversations: int) -> None:
    tokens = counts.get("train_tokens", 0) + counts.get("held_out_tokens", 0)
    supervised = counts.get("train_supervised_tokens", 0) + counts.get("held_out_supervised_tokens", 0)
    measured.tokens_per_conversation = tokens / max(1, conversations)
    measured.supervised_share = supervised / max(1, tokens)
