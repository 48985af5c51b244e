"""Engines that capture for a trainer, a window at a time; what is trained on is never stored."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch

from eyas.capture.checked_writer import CheckedShardWriter
from eyas.capture.statistics import table_of
from eyas.capture.stream_cache import Keeper, Unit
from eyas.config.schema import RunConfig
from eyas.data.prepared import read_samples
from eyas.drafters.base import DraftConfig
from eyas.engines.probe import compare_states, probe_again
from eyas.errors import UserError
from eyas.files import fingerprint
from eyas.plan.estimates import PlannedDraft, training_memory
from eyas.plan.target_size import read_target_size
from eyas.progress import say
from eyas.stages.extract import examples_of, make_check, make_engine, probe_engine
from eyas.stages.run_context import RunContext, facts_of
from eyas.store.base import StateReader
from eyas.store.journal import ShardRecord
from eyas.store.window_store import Shares, StreamedStates, bytes_of, owned
from eyas.train.launch import as_if_alone
from eyas.train.prefetch import Windows, whole
from eyas.train.rank_errors import report_first_failure
from eyas.train.ranks import Ranks
from eyas.train.step_plan import StepPlan
from eyas.types import Failure, HiddenStates, TokenizedSample


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
    """What captures this rank's share of windows: an engine here, or several elsewhere."""

    busy_s: float  # seconds that engines worked for this rank

    def begin(self, units: Sequence[Unit]) -> None:
        """Be told what all ranks will ask for, each its own and in this order."""
        ...

    def capture(self, unit: Unit, samples: Sequence[TokenizedSample]) -> Window: ...

    def close(self) -> None: ...


class OneEngine:
    """An engine of this process, started and probed, that vouches for each window."""

    def __init__(self, context: RunContext, samples: Sequence[TokenizedSample]) -> None:
        self.spec, self.busy_s = context.spec, 0.0
        examples = examples_of(samples)
        with as_if_alone():
            self.engine = make_engine(context)
            try:
                self.probed, self.check = probe_engine(context, self.engine, examples)
            except BaseException:
                self.engine.close()
                raise

    def compare(self, ranks: Ranks) -> None:
        """Raises: ProbeError where this rank's engine gives other states than the first one's."""
        known = ranks.on_first(lambda: self.probed.states)
        compare_states(self.probed.states, known, self.spec, f"on rank {ranks.rank} and on rank 0")

    def begin(self, units: Sequence[Unit]) -> None:
        pass

    def capture(self, unit: Unit, samples: Sequence[TokenizedSample]) -> Window:
        """Return the states of ``samples``, checked as extract does.

        Raises: ContractError for wrong states or an engine that has drifted; EyasError for a failed sample.
        """
        started, window = time.monotonic(), Window()
        shelf = CheckedShardWriter(window, self.check, max_failures=0)
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
    """The train split as one rank's trainer reads it, and what captures it once it is started."""

    def __init__(self, context: RunContext, ranks: Ranks) -> None:
        config, spec = context.config, context.spec
        self.ranks, self.samples = ranks, train_samples(context)
        data = fingerprint([context.output_of(context.samples_stage), spec.fingerprint, "train"])
        self.in_turns = StreamedStates(spec, self.samples, self._capture, data)
        self.states: StateReader = self.in_turns
        self.windows: Windows = self._windows
        cost_of = partial(context.drafter.cost_of, settings=config.draft)
        self.steps = StepPlan.of(self.in_turns, cost_of, config.train, config.seed, ranks.size).shares
        fleet = config.extract.fleet
        # Units that exist at a time: each rank's, and with a fleet each rank's next and one an engine.
        self.room = 2 * ranks.size + fleet.replicas if fleet else ranks.size
        bounds = self.in_turns.plan(self.steps, config.train.stream_bytes // self.room)
        self.units = [
            unit
            for number, (start, end) in enumerate(bounds)
            for rank in range(ranks.size)
            if (unit := Unit(number, rank, _samples_of(self.steps[start:end], rank))).samples
        ]
        self._own = {unit.window: unit for unit in self.units if unit.rank == ranks.rank}
        self.num_captured = 0
        self.figures: list[Mapping[str, Any] | None] = []
        self.source: Source | None = None
        self._busy_before_s = 0.0
        self.kept_from = len(bounds)  # the window from which on all states are kept
        self.keeper: Keeper | None = None
        if config.train.keep_states:
            ends = list(accumulate(len(unit.samples) for unit in self.units))
            self.first_epoch = self.units[: ends.index(len(self.samples)) + 1]
            self.keeper = Keeper(context, ranks, self.samples, data, self.first_epoch)
        if self.keeper and self.keeper.whole:
            say(f"train: all states are kept in {self.keeper.folder}; no engine is needed")
            self.states, self.windows = self.keeper.whole, whole

    @property
    def needs_engine(self) -> bool:
        return self.windows is not whole

    @property
    def busy_s(self) -> float:
        """Seconds that engines worked for this rank."""
        return self._busy_before_s + (self.source.busy_s if self.source else 0.0)

    def close(self) -> None:
        self._busy_before_s = self.busy_s
        source, self.source = self.source, None
        if source:
            source.close()

    def _windows(
        self, steps: Sequence[Sequence[Sequence[int]]], first: int, last: int
    ) -> Iterable[Sequence[Sequence[int]]]:
        assert self.source is not None
        bounds = self.in_turns.bounds
        coming = [
            unit
            for unit in self.units
            for start, end in [bounds[unit.window]]
            if _samples_of(self.steps[max(start, first) : min(end, last)], unit.rank)
        ]
        if self.keeper and self.keeper.will_be_whole(coming):
            self.kept_from = self.first_epoch[-1].window + 1
        self.source.begin([unit for unit in coming if unit.window < self.kept_from])
        return self.in_turns.windows(steps, first, last)

    def _capture(self, samples: Sequence[TokenizedSample], number: int) -> Sequence[HiddenStates]:
        if number >= self.kept_from:
            assert self.keeper is not None
            if isinstance(self.source, OneEngine):
                self.close()  # its memory is better used
            return [self.keeper.read(sample) for sample in samples]
        assert self.source is not None
        unit = self._own[number]
        window = self.source.capture(unit, samples)
        self.num_captured += sum(map(len, samples))
        self.figures.append(window.figures)
        if self.keeper:
            self.keeper.keep(unit, window.states, window.figures)
        return window.states


def _samples_of(steps: Sequence[Shares], rank: int) -> tuple[int, ...]:
    return tuple(i for shares in steps for group in shares[rank] for i in group)


@contextmanager
def streaming(context: RunContext, draft: DraftConfig, ranks: Ranks) -> Iterator[Stream]:
    """Start and probe an engine for the train split, unless all its states are kept; it is closed at the end.

    Of several ranks each has an engine on its own GPU, or they share a fleet.
    Raises: UserError for samples that do not fit in ``train.stream_bytes``, or a GPU too small for both.
    """
    config = context.config
    if facts_of(context, "extract")["inputs"]["samples"] != context.output_of(context.samples_stage):
        raise UserError(
            "the samples have changed since the held-out ones were captured",
            hint=f"run: eyas extract -c {config.run_dir / 'run.yaml'} --fresh",
        )
    _check_engines(config, ranks.size)
    # The run's own folder is locked already; states elsewhere may be wanted by another run.
    shared = config.train.keep_states and config.extract.states_dir is not None and ranks.is_first
    with context.states_folder.lock() if shared else nullcontext():
        stream = Stream(context, ranks)
        try:
            if stream.needs_engine:
                _check_room(stream, context)
                if config.extract.fleet is None:
                    _check_gpu(context, draft, stream.samples)
                    stream.source = one = OneEngine(context, stream.samples)
                    one.compare(ranks)
                else:
                    from eyas.capture.stream_fleet import EngineFleet

                    stream.source = EngineFleet(context, ranks, stream.room)
            with report_first_failure(ranks):
                yield stream
            if not ranks.is_first:
                stream.close()
            ranks.gather(None)  # a fleet is the first rank's, and ends when the others have left it
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
        ("extract.max_failures", config.extract.max_failures > 0, "a batch cannot leave out a sample"),
        ("extract.states_dtype", config.extract.states_dtype != "auto", "nothing is stored in 8 bits"),
    ):
        if is_set:
            raise UserError(
                f"train.source=stream does not go with {key}: {why}",
                hint=f"leave {key} out, or store the states with train.source=store",
            )
    _check_engines(config, config.train.num_gpus)


def _check_engines(config: RunConfig, num_ranks: int) -> None:
    """Raises: UserError for an engine of several GPUs beside each of several ranks, which have one."""
    extract, gpus = config.extract, config.vllm.tensor_parallel_size
    if num_ranks > 1 and gpus > 1 and extract.engine == "vllm" and not (extract.fleet or extract.endpoint):
        raise UserError(
            f"each of {num_ranks} ranks captures on its own GPU, and vllm.tensor_parallel_size={gpus}",
            hint="let engines of their own capture: extract.fleet={replicas: N, gpus_per_replica: "
            f"{gpus}}}, or a server (extract.endpoint)",
        )


def facts_of_stream(context: RunContext, stream: Stream) -> dict[str, Any]:
    """Return what the stage records: who waited for whom since training last started, and the layers seen.

    ``waited_s`` is how long a trainer waited for states and ``trainer_s`` how long it worked on them, the
    mean over the ranks; the other figures are sums. ``engine_s`` is how long engines worked.
    """
    turns, ids = stream.in_turns.turns, (*context.spec.aux_layer_ids, context.spec.num_layers)
    own = {
        "engine_s": stream.busy_s,
        "trainer_s": turns.trainer_s,
        "waited_s": turns.waited_s,
        "num_tokens": turns.num_tokens,
        "num_captured": stream.num_captured,
        "peak_bytes": turns.peak_bytes,
    }
    everyone = stream.ranks.gather((own, stream.figures))
    total = {name: sum(found[name] for found, _ in everyone) for name in own}
    figures = [one for _, found in everyone for one in found]
    if not stream.needs_engine and stream.keeper and stream.keeper.whole:
        figures = stream.keeper.whole.figures
    size = stream.ranks.size
    trainer_s, waited_s = total["trainer_s"] / size, total["waited_s"] / size
    engines = total["engine_s"] / total["trainer_s"] if trainer_s else None
    if engines is not None:
        fleet = context.config.extract.fleet
        slower = "engine" if engines * size >= (fleet.replicas if fleet else size) else "trainer"
        busy = f"{engines:.2g} engines would keep one trainer" if engines >= 1 else (
            f"one engine would keep {1 / max(engines, 1e-9):.2g} trainers"
        )  # fmt: skip
        trainers = "the trainer" if size == 1 else f"each of {size} trainers"
        say(
            f"train: {slower}-bound: engines worked {total['engine_s']:.1f} s, {trainers} {trainer_s:.1f} "
            f"s and waited {waited_s:.1f} s for {turns.num_windows} windows; "
            f"on devices of their own, {busy} busy"
        )
    return {
        "stream": {
            **total,
            "engine_s": round(total["engine_s"], 3),
            "trainer_s": round(trainer_s, 3),
            "waited_s": round(waited_s, 3),
            "num_windows": turns.num_windows,
            "num_trainers": size,
            "engines_per_trainer": engines,
        },
        "layers": {"train": dict(zip(map(str, ids), table_of(figures), strict=False))},
    }


def _check_room(stream: Stream, context: RunContext) -> None:
    sizes = [bytes_of(sample, context.spec) for sample in stream.samples]
    largest = max(
        sum(sizes[i] for i in _samples_of([step], rank))
        for step in stream.steps
        for rank in range(stream.ranks.size)
    )
    needed, given = largest * stream.room, context.config.train.stream_bytes
    if needed > given:
        raise UserError(
            f"the states of one step take up to {largest:,} bytes, and room is needed for {stream.room} such "
            f"parts: more than train.stream_bytes={given:,}",
            hint=f"set train.stream_bytes={needed} or more, or lower train.batches_per_step",
        )


def _check_gpu(context: RunContext, draft: DraftConfig, samples: Sequence[TokenizedSample]) -> None:
    """Refuse a vLLM that takes so much of the GPU that training does not fit beside it."""
    config = context.config
    if context.device != "cuda" or config.extract.engine != "vllm" or config.extract.endpoint is not None:
        return
    supervised = sum(int(s.supervised.sum()) for s in samples) / sum(len(s) for s in samples)
    planned = PlannedDraft(context.drafter, draft)
    size = read_target_size(config.target, context.default_aux_layer_ids)
    needed = training_memory(config, planned, size, supervised)
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    share = config.vllm.gpu_memory_utilization
    if needed > total * (1 - share):
        fitting = int(100 * (1 - needed / total)) / 100
        raise UserError(
            f"training needs about {needed / 2**30:.1f} GiB beside vLLM, whose share of "
            f"{share} leaves {total * (1 - share) / 2**30:.1f} GiB of the GPU",
            hint=f"set vllm.gpu_memory_utilization={fitting}"
            if fitting > 0
            else "lower train.batch_tokens, or store the states with train.source=store",
        )
