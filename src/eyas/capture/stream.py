"""Engines that capture for a trainer, a window at a time; what is trained on is never stored."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from eyas.capture.capture_run import CaptureRun
from eyas.capture.sample_checks import train_samples
from eyas.capture.statistics import table_of
from eyas.capture.stream_cache import StreamCache
from eyas.capture.stream_engine import StreamEngine
from eyas.capture.windows import Unit, WindowSource
from eyas.config.schema import RunConfig, TrainSettings
from eyas.engines.checks import check_engine_a_rank, check_gpu_share
from eyas.engines.info import engine_info
from eyas.errors import UserError
from eyas.files import fingerprint
from eyas.progress import say
from eyas.store.base import StateReader
from eyas.store.window_store import Shares, StreamedStates, bytes_of
from eyas.train.prefetch import Windows, whole
from eyas.train.rank_errors import report_first_failure
from eyas.train.ranks import Ranks
from eyas.train.step_plan import StepPlan
from eyas.types import HiddenStates, TokenizedSample


class Stream:
    """The train split as one rank's trainer reads it, and what captures it once it is started."""

    def __init__(
        self,
        run: CaptureRun,
        settings: TrainSettings,
        cost_of: Callable[[np.ndarray], float],
        ranks: Ranks,
        seed: int,
        samples_fingerprint: str,
        fresh: bool,
    ) -> None:
        """``cost_of`` tells about how much work a sample is; ``samples_fingerprint`` identifies the
        samples; ``fresh`` deletes states that were kept in part.

        Raises: UserError for a sample that no engine can compute, or kept states that do not fit.
        """
        spec = run.spec
        self.spec, self.ranks, self.samples = spec, ranks, train_samples(run)
        data = fingerprint([samples_fingerprint, spec.fingerprint, "train"])
        self.in_turns = StreamedStates(spec, self.samples, self._capture, data)
        self.states: StateReader = self.in_turns
        self.windows: Windows = self._windows
        self.steps = StepPlan.of(self.in_turns, cost_of, settings, seed, ranks.size).shares
        self.fleet = run.settings.fleet
        # Units that exist at a time: each rank's, and with a fleet each rank's next and one an engine.
        self.room = 2 * ranks.size + self.fleet.replicas if self.fleet else ranks.size
        bounds = self.in_turns.plan(self.steps, settings.stream_bytes // self.room)
        self.units = [
            unit
            for number, (start, end) in enumerate(bounds)
            for rank in range(ranks.size)
            if (unit := Unit(number, rank, _samples_of(self.steps[start:end], rank))).samples
        ]
        self._own = {unit.window: unit for unit in self.units if unit.rank == ranks.rank}
        self.num_captured = 0
        self.figures: list[Mapping[str, Any] | None] = []
        self.source: WindowSource | None = None
        self._busy_before_s = 0.0
        self.kept_from = len(bounds)  # the window from which on all states are kept
        self.cache: StreamCache | None = None
        if settings.keep_states:
            ends = list(accumulate(len(unit.samples) for unit in self.units))
            self.first_epoch = self.units[: ends.index(len(self.samples)) + 1]
            self.cache = StreamCache(
                run.states_folder, spec, ranks, self.samples, data, self.first_epoch, fresh
            )
        if self.cache and self.cache.whole:
            say(f"train: all states are kept in {self.cache.folder}; no engine is needed")
            self.states, self.windows = self.cache.whole, whole

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
        if self.cache and self.cache.will_be_whole(coming):
            self.kept_from = self.first_epoch[-1].window + 1
        self.source.begin([unit for unit in coming if unit.window < self.kept_from])
        return self.in_turns.windows(steps, first, last)

    def _capture(self, samples: Sequence[TokenizedSample], number: int) -> Sequence[HiddenStates]:
        if number >= self.kept_from:
            assert self.cache is not None
            if self.source and self.source.shares_device:
                self.close()  # its memory is better used
            return [self.cache.read(sample) for sample in samples]
        assert self.source is not None
        unit = self._own[number]
        window = self.source.capture(unit, samples)
        self.num_captured += sum(map(len, samples))
        self.figures.append(window.figures)
        if self.cache:
            self.cache.keep(unit, window.states, window.figures)
        return window.states


def _samples_of(steps: Sequence[Shares], rank: int) -> tuple[int, ...]:
    return tuple(i for shares in steps for group in shares[rank] for i in group)


@contextmanager
def streaming(
    run: CaptureRun,
    settings: TrainSettings,
    cost_of: Callable[[np.ndarray], float],
    ranks: Ranks,
    *,
    seed: int,
    samples_fingerprint: str,
    fresh: bool,
    on_gpu: bool,
    check_gpu: Callable[[Sequence[TokenizedSample]], None],
) -> Iterator[Stream]:
    """Start and probe an engine for the train split, unless all its states are kept; it is closed at the end.

    Of several ranks each has an engine on its own GPU, or they share a fleet. ``check_gpu`` refuses samples
    that an engine and a trainer cannot share a GPU for.
    Raises: UserError for samples that do not fit in ``train.stream_bytes``, or a GPU too small for both.
    """
    # The run's own folder is locked already; states elsewhere may be wanted by another run.
    shared = settings.keep_states and run.settings.states_dir is not None and ranks.is_first
    with run.states_folder.lock() if shared else nullcontext():
        stream = Stream(run, settings, cost_of, ranks, seed, samples_fingerprint, fresh)
        try:
            if stream.needs_engine:
                _check_room(stream, settings.stream_bytes)
                if run.settings.fleet is None:
                    check_gpu(stream.samples)
                    stream.source = one = StreamEngine(run, stream.samples)
                    one.compare(ranks)
                else:
                    from eyas.capture.stream_fleet import EngineFleet

                    stream.source = EngineFleet(run, ranks, stream.room, on_gpu)
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
    check_engine_a_rank(config, config.train.num_gpus)


def facts_of_stream(stream: Stream) -> dict[str, Any]:
    """Return what the stage records: who waited for whom since training last started, and the layers seen.

    ``waited_s`` is how long a trainer waited for states and ``trainer_s`` how long it worked on them, the
    mean over the ranks; the other figures are sums. ``engine_s`` is how long engines worked.
    """
    turns, ids = stream.in_turns.turns, (*stream.spec.aux_layer_ids, stream.spec.num_layers)
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
    if not stream.needs_engine and stream.cache and stream.cache.whole:
        figures = stream.cache.whole.figures
    size = stream.ranks.size
    trainer_s, waited_s = total["trainer_s"] / size, total["waited_s"] / size
    engines = total["engine_s"] / total["trainer_s"] if trainer_s else None
    if engines is not None:
        num_engines = stream.fleet.replicas if stream.fleet else size
        slower = "engine" if engines * size >= num_engines else "trainer"
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


def _check_room(stream: Stream, given: int) -> None:
    sizes = [bytes_of(sample, stream.spec) for sample in stream.samples]
    largest = max(
        sum(sizes[i] for i in _samples_of([step], rank))
        for step in stream.steps
        for rank in range(stream.ranks.size)
    )
    needed = largest * stream.room
    if needed > given:
        raise UserError(
            f"the states of one step take up to {largest:,} bytes, and room is needed for {stream.room} such "
            f"parts: more than train.stream_bytes={given:,}",
            hint=f"set train.stream_bytes={needed} or more, or lower train.batches_per_step",
        )


def check_gpu(
    config: RunConfig,
    on_gpu: bool,
    training_bytes: Callable[[float], float],
    samples: Sequence[TokenizedSample],
) -> None:
    """Refuse an engine that reserves so much of the GPU that training does not fit next to it.

    ``training_bytes`` estimates what training needs, given the share of tokens that are supervised.
    Raises: UserError.
    """
    share = engine_info(config.extract.engine).memory_share(config)
    if not on_gpu or not share or config.extract.endpoint is not None:
        return
    needed = training_bytes(sum(int(s.supervised.sum()) for s in samples) / sum(len(s) for s in samples))
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    check_gpu_share(config, needed, total)
