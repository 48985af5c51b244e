"""Engines that capture for a trainer, a window at a time; what is trained on is never stored."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch

from eyas.config.schema import RunConfig
from eyas.data.prepared import read_samples
from eyas.draft.base import DraftConfig
from eyas.engines.probe import probe_again
from eyas.errors import UserError
from eyas.files import fingerprint
from eyas.progress import say
from eyas.stages.context import RunContext, facts_of
from eyas.stages.estimates import training_memory
from eyas.stages.extract import examples_of, make_check, make_engine, probe_engine
from eyas.stages.kept import Keeper
from eyas.stages.shape import read_shape
from eyas.stages.shelf import Shelf
from eyas.stages.statistics import table_of
from eyas.store.base import StateReader
from eyas.store.journal import ShardRecord
from eyas.store.streamed import StreamedStates, owned
from eyas.train.feed import Windows, whole
from eyas.train.schedule import costs_of, plan_steps
from eyas.types import Failure, HiddenStates, TargetSpec, TokenizedSample


@dataclass
class Window:
    """The states of one window; what a shelf writes to instead of a store."""

    states: Sequence[HiddenStates] = ()
    figures: Mapping[str, Any] | None = None

    def write(
        self,
        shard: int,
        states: Sequence[HiddenStates],
        failures: Sequence[Failure] = (),
        figures: Mapping[str, Any] | None = None,
    ) -> ShardRecord:
        self.states, self.figures = states, figures
        size = sum(s.aux.nbytes + s.last.nbytes for s in states)
        return ShardRecord(shard, len(states), sum(len(s.sample) for s in states), size, checksum="")


class Source(Protocol):
    """What captures windows: an engine here, or several elsewhere."""

    busy_s: float  # seconds that engines worked

    def capture(self, samples: Sequence[TokenizedSample], number: int) -> Window: ...

    def close(self) -> None: ...


class OneEngine:
    """An engine of this process, started and probed, that vouches for each window."""

    def __init__(self, context: RunContext, samples: Sequence[TokenizedSample]) -> None:
        self.spec, self.busy_s = context.spec, 0.0
        examples = examples_of(samples)
        self.engine = make_engine(context)
        try:
            self.probed, self.check = probe_engine(context, self.engine, examples)
        except BaseException:
            self.engine.close()
            raise

    def capture(self, samples: Sequence[TokenizedSample], number: int) -> Window:
        """Return the states of ``samples``, checked as extract does.

        Raises: ContractError for wrong states or an engine that has drifted; EyasError for a failed sample.
        """
        started, window = time.monotonic(), Window()
        shelf = Shelf(window, self.check, max_failures=0)
        try:
            for item in self.engine.capture(shelf.feed([(0, samples)])):
                shelf.put(item if isinstance(item, Failure) else owned(item, self.spec))
            shelf.finish()
        finally:
            shelf.close()
        # Before anything is learnt from them: a checkpoint could not be told from a good one afterwards.
        probe_again(self.engine, self.spec, self.probed)
        self.busy_s += time.monotonic() - started
        return window

    def close(self) -> None:
        self.engine.close()


def train_samples(context: RunContext) -> list[TokenizedSample]:
    """Read the train split, checked."""
    check, samples = make_check(context), []
    for sample in read_samples(context.samples_folder, "train"):
        check(sample)
        samples.append(sample)
    return samples


class Stream:
    """The train split as a trainer reads it, and what captures it once it is started."""

    def __init__(self, context: RunContext) -> None:
        config, spec = context.config, context.spec
        self.samples = train_samples(context)
        data = fingerprint([context.output_of(context.samples_stage), spec.fingerprint, "train"])
        fleet = config.extract.fleet
        self.ahead = fleet.replicas + 1 if fleet else 0  # windows that are captured while one is trained on
        window_bytes = config.train.stream_bytes // (self.ahead + 1)
        in_turns = StreamedStates(spec, self.samples, self._capture, window_bytes, data)
        self.turns = in_turns.turns
        self.states: StateReader = in_turns
        self.windows: Windows = in_turns.windows
        self.num_captured = 0
        self.figures: list[Mapping[str, Any] | None] = []
        self.source: Source | None = None
        self._busy_before_s = 0.0
        self.keeper: Keeper | None = None
        steps = plan_steps(in_turns.lengths, costs_of(in_turns), config.train, config.seed)
        groups = [group for step in steps for group in step]
        self.plan = [[i for g in groups[start:end] for i in g] for start, end in in_turns.plan(groups)]
        if config.train.keep_states:
            ends = list(accumulate(map(len, self.plan)))
            self.keeper = Keeper(context, self.samples, data, self.plan[: ends.index(len(self.samples)) + 1])
        if self.keeper and self.keeper.whole:
            say(f"train: all states are kept in {self.keeper.folder}; no engine is needed")
            self.states, self.windows = self.keeper.whole, whole

    @property
    def needs_engine(self) -> bool:
        return self.windows is not whole

    @property
    def busy_s(self) -> float:
        """Seconds that engines worked."""
        return self._busy_before_s + (self.source.busy_s if self.source else 0.0)

    def close(self) -> None:
        self._busy_before_s = self.busy_s
        source, self.source = self.source, None
        if source:
            source.close()

    def _capture(self, samples: Sequence[TokenizedSample], number: int) -> Sequence[HiddenStates]:
        if self.keeper and self.keeper.whole:
            return [self.keeper.whole.of(sample) for sample in samples]
        assert self.source is not None
        window = self.source.capture(samples, number)
        self.num_captured += sum(map(len, samples))
        self.figures.append(window.figures)
        if self.keeper:
            self.keeper.keep(number, window.states, window.figures)
            if self.keeper.whole:
                self.close()  # its memory is better used
        return window.states


@contextmanager
def streaming(context: RunContext, draft: DraftConfig) -> Iterator[Stream]:
    """Start and probe an engine for the train split, unless all its states are kept; it is closed at the end.

    Raises: UserError for samples that do not fit in ``train.stream_bytes``, or a GPU too small for both.
    """
    config = context.config
    if facts_of(context, "extract")["inputs"]["samples"] != context.output_of(context.samples_stage):
        raise UserError(
            "the samples have changed since the held-out ones were captured",
            hint=f"run: eyas extract -c {config.run_dir / 'run.yaml'} --fresh",
        )
    # The run's own folder is locked already; states elsewhere may be wanted by another run.
    shared = config.train.keep_states and config.extract.states_dir is not None
    with context.states_folder.lock() if shared else nullcontext():
        stream = Stream(context)
        try:
            if stream.needs_engine:
                _check_room(config, context.spec, stream.samples)
                if config.extract.fleet is None:
                    _check_gpu(context, draft, stream.samples)
                    stream.source = OneEngine(context, stream.samples)
                else:
                    from eyas.stages.stream_fleet import EngineFleet

                    stream.source = EngineFleet(context, stream.plan, stream.ahead)
            yield stream
        finally:
            stream.close()


def check_stream(config: RunConfig) -> None:
    """Raises: UserError for settings that a stream cannot follow."""
    if config.train.source != "stream":
        if config.train.keep_states:
            raise UserError(
                "train.keep_states is for train.source=stream; extract keeps all states anyway",
                hint="leave it out, or set train.source=stream",
            )
        return
    for key, is_set, why in (
        ("train.num_gpus", config.train.num_gpus > 1, "one process trains on a stream"),
        ("extract.max_failures", config.extract.max_failures > 0, "a batch cannot leave out a sample"),
        ("extract.states_dtype", config.extract.states_dtype != "auto", "nothing is stored in 8 bits"),
    ):
        if is_set:
            raise UserError(
                f"train.source=stream does not go with {key}: {why}",
                hint=f"leave {key} out, or store the states with train.source=store",
            )


def facts_of_stream(context: RunContext, stream: Stream) -> dict[str, Any]:
    """Return what the stage records: who waited for whom since training last started, and the layers seen.

    ``waited_s`` is how long the trainer waited for states; ``engine_s`` how long engines worked on them.
    """
    figures = stream.figures
    if not stream.needs_engine and stream.keeper and stream.keeper.whole:
        figures = stream.keeper.whole.figures
    turns, ids = stream.turns, (*context.spec.aux_layer_ids, context.spec.num_layers)
    engines = stream.busy_s / turns.trainer_s if turns.trainer_s else None
    if engines is not None:
        fleet = context.config.extract.fleet
        slower = "engine" if engines >= (fleet.replicas if fleet else 1) else "trainer"
        busy = f"{engines:.2g} engines would keep one trainer" if engines >= 1 else (
            f"one engine would keep {1 / max(engines, 1e-9):.2g} trainers"
        )  # fmt: skip
        say(
            f"train: {slower}-bound: engines worked {stream.busy_s:.1f} s, the trainer {turns.trainer_s:.1f} "
            f"s and waited {turns.waited_s:.1f} s for {turns.num_windows} windows; "
            f"on devices of their own, {busy} busy"
        )
    return {
        "stream": {
            "engine_s": round(stream.busy_s, 3),
            "trainer_s": round(turns.trainer_s, 3),
            "waited_s": round(turns.waited_s, 3),
            "num_windows": turns.num_windows,
            "num_tokens": turns.num_tokens,
            "num_captured": stream.num_captured,
            "peak_bytes": turns.peak_bytes,
            "engines_per_trainer": engines,
        },
        "layers": {"train": dict(zip(map(str, ids), table_of(figures), strict=False))},
    }


def _check_room(config: RunConfig, spec: TargetSpec, samples: Sequence[TokenizedSample]) -> None:
    lengths = [len(s) for s in samples]
    tokens = max(min(config.train.batch_tokens, sum(lengths)), max(lengths, default=0))
    fleet = config.extract.fleet
    windows = fleet.replicas + 2 if fleet else 1
    needed = tokens * spec.bytes_per_token * windows
    if needed > config.train.stream_bytes:
        raise UserError(
            f"{windows} windows of one batch of {tokens:,} tokens have up to {needed:,} bytes of states, "
            f"more than train.stream_bytes={config.train.stream_bytes:,}",
            hint=f"set train.stream_bytes={needed} or more, or lower train.batch_tokens",
        )


def _check_gpu(context: RunContext, draft: DraftConfig, samples: Sequence[TokenizedSample]) -> None:
    """Refuse a vLLM that takes so much of the GPU that training does not fit beside it."""
    config = context.config
    if context.device != "cuda" or config.extract.engine != "vllm" or config.extract.endpoint is not None:
        return
    supervised = sum(int(s.supervised.sum()) for s in samples) / sum(len(s) for s in samples)
    needed = training_memory(config, draft, read_shape(config.target), supervised)
    total, share = torch.cuda.get_device_properties(0).total_memory, config.vllm.gpu_memory_utilization
    if needed > total * (1 - share):
        fitting = int(100 * (1 - needed / total)) / 100
        raise UserError(
            f"training needs about {needed / 2**30:.1f} GiB beside vLLM, whose share of "
            f"{share} leaves {total * (1 - share) / 2**30:.1f} GiB of the GPU",
            hint=f"set vllm.gpu_memory_utilization={fitting}"
            if fitting > 0
            else "lower train.batch_tokens, or store the states with train.source=store",
        )
