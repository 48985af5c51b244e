"""One run as its stages see it: settings, folders, target, and what each stage records."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from eyas import registry
from eyas.config.explain import to_commented_yaml
from eyas.config.load import LoadedConfig
from eyas.config.schema import RunConfig
from eyas.data.prepared import SPLITS, Split
from eyas.drafters.layers_read import captured_by_default, layers_read
from eyas.engines.info import engine_info
from eyas.errors import ContractError, UserError
from eyas.files import atomic_file, fingerprint
from eyas.progress import say
from eyas.registry import REFERENCE_ENGINE
from eyas.report.finished_run import FinishedRun
from eyas.run_folder import FOLDERS, STAGES, begin_record, read_record, write_record
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
    fresh: bool = False
    # When each stage began to work in this process, for the time it took (seconds of a monotonic clock).
    began: dict[str, float] = field(default_factory=dict)

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

        asked = self.config.train.device
        return ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked

    def folder(self, stage: str) -> Path:
        return self.config.run_dir / FOLDERS[stage]

    @property
    def states_folder(self) -> Folder:
        """Where the hidden states lie: in the run folder, or where extract.states_dir says."""
        return folder_of(self.config.extract.states_dir or self.folder("extract"))

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
        return info.start(self.config, folder, spec or self.spec, device, **settings)

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

    def output_of(self, stage: str) -> str:
        """Return the fingerprint of what an earlier stage wrote.

        Raises: UserError when it has not finished.
        """
        record = read_record(self.folder(stage))
        if record is None or not record["done"]:
            raise UserError(
                f"{self.folder(stage)} is not there yet or not complete",
                hint=f"run: eyas {stage} -c <run file>",
            )
        return str(record["output"])


def begin(
    context: RunContext, stage: str, inputs: Mapping[str, Any], is_whole: Callable[[], bool] = lambda: True
) -> bool:
    """Return whether the stage has work to do; record its inputs and the run's settings.

    Raises: as ``begin_record``.
    """
    folder = context.folder(stage)
    if not begin_record(folder, stage, inputs, context.fresh, is_whole):
        say(f"{stage}: already done ({folder})")
        return False
    context.began[stage] = time.monotonic()
    with atomic_file(context.config.run_dir / "run.yaml") as beside:
        beside.write_text(to_commented_yaml(context.loaded), encoding="utf-8")
    return True


def finish(context: RunContext, stage: str, output: Any, **facts: Any) -> None:
    """Record that a stage is complete; ``output`` identifies what it wrote."""
    record = read_record(context.folder(stage))
    assert record is not None
    facts["seconds"] = _seconds(context, stage, record)
    write_record(
        context.folder(stage), stage, record["inputs"], done=True, output=fingerprint(output), **facts
    )


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


def finished_run(context: RunContext) -> FinishedRun:
    """Return what reports are made from."""
    records = {stage: facts_of(context, stage) for stage in STAGES}
    return FinishedRun(context.loaded, context.drafter, context.draft_spec, records, context.data_folder)


def next_command(context: RunContext, stage: str) -> None:
    """Say what was written and what comes next."""
    todo = [s for s in STAGES if s != "regenerate" or context.config.regenerate.enabled]
    at = todo.index(stage)
    say(f"{stage}: wrote {context.folder(stage)}")
    if at + 1 < len(todo):
        say(f"next: eyas {todo[at + 1]} -c {context.config.run_dir / 'run.yaml'}")
