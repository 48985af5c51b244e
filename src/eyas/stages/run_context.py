"""One run as its stages see it: settings, folders, target, and what each stage records."""

import dataclasses
import functools
import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from eyas import registry
from eyas.config.explain import to_commented_yaml
from eyas.config.load import LoadedConfig, flatten
from eyas.config.paths import paths_from
from eyas.config.schema import RunConfig
from eyas.data.prepared import SPLITS, Split
from eyas.drafters.layers_read import captured_by_default, layers_read
from eyas.engines.info import engine_info
from eyas.engines.owner import EngineOwner
from eyas.errors import ContractError, UserError
from eyas.evaluations import other_evaluations
from eyas.files import atomic_file, fingerprint
from eyas.progress import say
from eyas.provenance import StageState, difference, settings_as_made, settings_before, stage_states
from eyas.registry import REFERENCE_ENGINE
from eyas.report.finished_run import FinishedRun
from eyas.report.stale import CARD, mark_stale
from eyas.run_folder import (
    FOLDERS,
    STAGES,
    begin_record,
    finished_folder,
    link_to_base,
    put_in_place,
    read_record,
    readable_record,
    redo_folder,
    write_record,
)
from eyas.store.shards import ShardStore
from eyas.store.storage import Folder, folder_of
from eyas.targets.resolve_model import is_local, locate, locate_description
from eyas.targets.spec import as_recorded, read_target
from eyas.targets.tokenizer import read_tokenizer
from eyas.targets.weights import Weights
from eyas.types import TargetSpec

# As many bytes for each of a weight file: it may be quantised, and activations need some.
_ROOM_FOR_WEIGHTS = 2.5


@dataclass
class RunContext:
    """One run, as a stage sees it."""

    loaded: LoadedConfig
    # Stages that are done again whatever exists, and those that are when they were made from other inputs.
    fresh: frozenset[str] = frozenset()
    may_differ: frozenset[str] = frozenset()
    # Whether eyas run goes through all stages, so that the next one follows by itself.
    in_whole_run: bool = False
    # The stage that may be taken from another run, but not worked on: a later one was asked for.
    only_taken: str | None = None
    # Where each stage works in this process; it takes the stage's own folder when it is complete.
    at_work: dict[str, Path] = field(default_factory=dict)
    # When each stage began to work in this process, for the time it took (seconds of a monotonic clock).
    began: dict[str, float] = field(default_factory=dict)
    owner: EngineOwner = field(default_factory=EngineOwner)

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @cached_property
    def target_folder(self) -> Path:
        """Where the target is described and its single tensors are found; its weights may lie elsewhere."""
        return locate_description(self.config.target.model, self.config.target.revision)

    @cached_property
    def spec(self) -> TargetSpec:
        """The target, with the aux layers that are captured."""
        return read_target(self.target_folder, self.config.target, self.default_aux_layer_ids)

    @cached_property
    def draft_spec(self) -> TargetSpec:
        """The target, with those aux layers that the draft reads. Raises: UserError for one not captured."""
        ids = layers_read(self.drafter, self.config.draft, self.spec)
        return dataclasses.replace(self.spec, aux_layer_ids=ids)

    @property
    def default_aux_layer_ids(self) -> Callable[[int], tuple[int, ...]]:
        return captured_by_default(self.drafter, self.config.draft)

    @property
    def drafter(self) -> Any:
        """The kind of draft that is trained: an ``eyas.drafters.base.Drafter``."""
        return registry.drafter(self.config.draft.architecture)

    def draft_spec_like(self, weights_fingerprint: str) -> TargetSpec:
        """Return ``draft_spec`` so that it compares with a record of that fingerprint, be it of eyas 0.1."""
        return as_recorded(self.draft_spec, weights_fingerprint, self.target_folder)

    @cached_property
    def tokenizer(self) -> Any:
        return read_tokenizer(self.target_folder, self.config.target.trust_remote_code)

    @property
    def device(self) -> str:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def train_device(self) -> str:
        """Where training runs; it alone reads train.device."""
        asked = self.config.train.device
        return self.device if asked == "auto" else asked

    def folder(self, stage: str) -> Path:
        """Where the output of a stage is, or where it is being written by this process."""
        return self.at_work.get(stage) or finished_folder(self.config.run_dir / FOLDERS[stage])

    def join(self, stage: str) -> None:
        """Work where the first rank has begun a stage."""
        folder = self.config.run_dir / FOLDERS[stage]
        self.at_work[stage] = redo if (redo := redo_folder(folder)).exists() else folder

    @property
    def states_folder(self) -> Folder:
        """Where the hidden states lie: in the run folder, or where extract.states_dir says."""
        elsewhere = self.config.extract.states_dir
        if elsewhere is None:
            return folder_of(self.folder("extract"))
        folder = folder_of(elsewhere)
        return folder / "redo" if self.redoes_states_elsewhere else folder

    @property
    def redoes_states_elsewhere(self) -> bool:
        """Whether states outside of the run folder are being made again, next to those that exist."""
        is_fresh = "extract" in self.at_work and "extract" in self.fresh
        return self.config.extract.states_dir is not None and is_fresh

    @property
    def stored_splits(self) -> tuple[Split, ...]:
        """The splits whose states extract stores; a stream captures those to train on as they are needed."""
        return ("held_out",) if self.config.train.source == "stream" else SPLITS

    def store(self, split: Split) -> ShardStore:
        """Open the finished states of a split.

        Raises: ContractError when they are not those that extract recorded.
        """
        store = ShardStore(self.states_folder / split)
        recorded = facts_of(self, "extract").get("stores", {}).get(split)
        if recorded != store.fingerprint:
            raise ContractError(
                f"{store.folder} holds other states ({store.fingerprint}) than extract wrote ({recorded})",
                hint="run the same eyas extract again",
            )
        return store

    @property
    def samples_folder(self) -> Path:
        """Where the samples to be extracted lie."""
        return self.folder("regenerate" if self.config.regenerate.enabled else "prepare")

    @property
    def data_folder(self) -> Path:
        """The samples' folder, or the prompts' where the samples do not exist yet."""
        samples = self.samples_folder
        return samples if (samples / "manifest.json").is_file() else self.folder("prepare")

    @property
    def samples_stage(self) -> str:
        return "regenerate" if self.config.regenerate.enabled else "prepare"

    def make_engine(self, name: str, spec: TargetSpec | None = None, **settings: Any) -> Any:
        """Load the target into an engine; with ``spec`` it captures other layers than the run does."""
        info = engine_info(name)
        # Only here is the whole model needed.
        folder = locate(self.config.target.model, self.config.target.revision)
        device = settings.pop("device", self.device)
        start = functools.partial(info.start, self.config, folder, spec or self.spec, device)
        if not self.owner.keeps or name != self.config.extract.engine:
            return start(**settings)
        extract, regenerate = self.config.extract, self.config.regenerate
        batch_size = max(extract.batch_size, regenerate.batch_size)
        shared = functools.partial(start, batch_tokens=extract.batch_tokens, batch_size=batch_size)
        return self.owner.lend(lambda: shared(answers=True))

    def open_target(self) -> Any:
        """Load the target into the reference engine, on a device that has room for it.

        Raises: UserError where its weights are not on this machine, or too large for it.
        """
        model = self.config.target.model
        if not is_local(model):
            raise UserError(f"{model} is not on this machine")
        return self.make_engine(REFERENCE_ENGINE, device=self._device_with_room())

    def _device_with_room(self) -> str:
        import psutil
        import torch

        needed = _ROOM_FOR_WEIGHTS * Weights(self.target_folder).num_bytes
        if self.device != "cpu" and torch.cuda.mem_get_info()[0] > needed:
            return self.device
        if psutil.virtual_memory().available > needed:
            return "cpu"
        raise UserError(f"there is no room for {needed / 1e9:,.0f} GB of it in memory")

    def records(self) -> dict[str, dict[str, Any] | None]:
        """Return what each stage recorded, in order; None for what cannot be read."""
        return {stage: readable_record(self.folder(stage)) for stage in STAGES}

    def states(self) -> dict[str, StageState]:
        """Return how far each stage is, and whether its output is still what these settings ask for."""
        return stage_states(self.records(), self.loaded.recorded)

    def output_of(self, stage: str) -> str:
        """Return the fingerprint of what an earlier stage wrote.

        Raises: UserError when it has not finished, or what it was made from has been made again.
        """
        record = read_record(self.folder(stage))
        state = stage_states(self.records())[stage]
        if state.state == "stale":
            raise UserError(
                f"{self.folder(stage)} is stale: {state.cause}",
                hint=f"run: eyas {stage} --fresh {shlex.join(self.loaded.arguments)}",
            )
        if record is None or state.state != "done":
            raise not_finished(self, stage)
        return str(record["output"])


def not_finished(context: RunContext, stage: str) -> UserError:
    """Return the error of a stage that needs the output of an earlier one."""
    return UserError(
        f"{context.folder(stage)} has not finished",
        hint=f"run: eyas {stage} {shlex.join(context.loaded.arguments)}",
    )


def begin(
    context: RunContext, stage: str, inputs: Mapping[str, Any], is_whole: Callable[[], bool] = lambda: True
) -> bool:
    """Return whether the stage has work to do; record its inputs and the run's settings.

    Raises: as ``begin_record``.
    """
    records = context.records()
    folder = context.config.run_dir / FOLDERS[stage]
    base = context.config.base_run
    if base is not None and stage in SHARED and link_to_base(folder, base / FOLDERS[stage], inputs):
        say(f"{stage}: taken from {base}")
    elif context.only_taken == stage:
        raise not_finished(context, stage)
    at = begin_record(
        folder,
        stage,
        inputs,
        is_whole,
        functools.partial(difference, stage, records=records),
        again=f"eyas {stage} --fresh {shlex.join(context.loaded.arguments)}",
        fresh=stage in context.fresh,
        may_differ=stage in context.may_differ,
    )
    if at is None:
        say(f"{stage}: already done ({folder})")
        return False
    record = records[stage]
    if record is not None and record["done"] and at != folder and stage not in context.fresh:
        say(f"{stage}: is done again: {difference(stage, record['inputs'], inputs, records)}")
    context.at_work[stage] = at
    context.began[stage] = time.monotonic()
    write_settings(context, stage, records)
    return True


def write_settings(context: RunContext, stage: str, records: Mapping[str, Any]) -> None:
    """Write run.yaml: these settings, and of the stages before ``stage`` those that they were made with."""
    loaded, changed = as_made(context, records, STAGES[: STAGES.index(stage)])
    if changed:
        say(f"{stage}: earlier stages keep what they were made with: {', '.join(changed)}")
    with atomic_file(context.config.run_dir / "run.yaml") as beside:
        beside.write_text(to_commented_yaml(loaded, context.config.run_dir), encoding="utf-8")


def is_done_again(context: RunContext, stage: str, inputs: Mapping[str, Any]) -> bool:
    """Whether ``begin`` will start a stage anew that these settings allow to do again."""
    made_from = facts_of(context, stage).get("inputs")
    differs = made_from is not None and made_from != json.loads(json.dumps(inputs))
    return stage in context.fresh or (differs and stage in context.may_differ)


def as_made(
    context: RunContext, records: Mapping[str, Any], stages: Sequence[str] = STAGES
) -> tuple[LoadedConfig, list[str]]:
    """Return the settings with those that the finished ``stages`` were made with, and which that changed."""
    values, changed = settings_as_made(context.loaded.recorded, records, stages)
    if not changed:
        return context.loaded, []
    origins = context.loaded.origins | dict.fromkeys(changed, "the run")
    paths_from(context.config.run_dir, values)
    config = RunConfig.model_validate(values | {"run_dir": context.config.run_dir})
    for key, _ in flatten(config.model_dump(mode="json")):
        origins.setdefault(key, "the run")
    return dataclasses.replace(context.loaded, config=config, origins=origins), changed


def finish(context: RunContext, stage: str, output: Any, **facts: Any) -> None:
    """Record that a stage is complete; ``output`` identifies what it wrote."""
    record, records = read_record(context.folder(stage)), context.records()
    assert record is not None
    facts["seconds"] = _seconds(context, stage, record)
    facts["before"] = settings_before(stage, records)
    facts |= {"done": True, "output": fingerprint(output)}
    # First, so that no report or card is believed that a kill from here on leaves behind.
    states = stage_states(records | {stage: record | facts})
    for later, path in (("evaluate", report_path(context)), ("export", context.folder("export") / CARD)):
        if cause := states[later].cause:
            mark_stale(path, cause)
    write_record(context.folder(stage), stage, record["inputs"], **facts)
    del context.at_work[stage]
    put_in_place(context.config.run_dir / FOLDERS[stage])


# What runs may share (base_run). A draft has its run's card in it, and is quickly written.
SHARED = ("prepare", "regenerate", "extract", "train")


def report_path(context: RunContext) -> Path:
    return context.config.run_dir / "report.html"


def interrupted(context: RunContext, stage: str) -> None:
    """Add the time that a stage worked without finishing to its record, so that its sum is true."""
    record = read_record(context.folder(stage)) if stage in context.began else None
    if record is not None and not record["done"]:
        seconds = _seconds(context, stage, record)
        write_record(context.folder(stage), stage, record["inputs"], done=False, seconds=seconds)


def _seconds(context: RunContext, stage: str, record: Mapping[str, Any]) -> float:
    """Return how long the stage has worked, in this process and before."""
    return float(round(record.get("seconds", 0.0) + time.monotonic() - context.began[stage], 3))


def facts_of(context: RunContext, stage: str) -> dict[str, Any]:
    """Return a finished stage's record."""
    record = read_record(context.folder(stage))
    return record or {}


def num_held_out(context: RunContext) -> int:
    """Return how many conversations are kept to measure on, or samples where they came tokenized."""
    counts = facts_of(context, "prepare")["counts"]
    return int(counts.get("held_out_conversations") or counts.get("held_out_samples", 0))


def finished_run(context: RunContext) -> FinishedRun:
    """Return what reports are made from."""
    found = context.records()
    states = stage_states(found)
    records = {stage: r for stage, r in found.items() if r is not None and states[stage].state == "done"}
    loaded, _ = as_made(context, records)
    others = other_evaluations(context.config.run_dir)
    return FinishedRun(loaded, context.drafter, context.draft_spec, records, context.data_folder, others)


def next_command(context: RunContext, stage: str) -> None:
    """Say what was written and, where no other stage follows by itself, what comes next."""
    todo = [s for s in STAGES if s != "regenerate" or context.config.regenerate.enabled]
    at = todo.index(stage)
    say(f"{stage}: wrote {context.folder(stage)}")
    if at + 1 < len(todo) and not context.in_whole_run:
        say(f"next: eyas {todo[at + 1]} -c {context.config.run_dir / 'run.yaml'}")
