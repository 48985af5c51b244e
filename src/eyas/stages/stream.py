"""An engine that captures for a trainer in the same process, in turns; what is trained on is never stored."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from eyas.config.schema import RunConfig
from eyas.data.prepared import read_samples
from eyas.draft.base import DraftConfig
from eyas.engines.base import Engine
from eyas.engines.probe import Probed, probe_again
from eyas.errors import UserError
from eyas.files import fingerprint
from eyas.progress import say
from eyas.stages.context import RunContext, facts_of
from eyas.stages.estimates import training_memory
from eyas.stages.extract import check_of, examples_of, make_check, make_engine, probe_engine
from eyas.stages.shape import read_shape
from eyas.stages.shelf import Check, Shelf
from eyas.stages.statistics import table_of
from eyas.store.journal import ShardRecord
from eyas.store.streamed import StreamedStates, owned
from eyas.types import Failure, HiddenStates, TargetSpec, TokenizedSample


@dataclass
class _Window:
    """What a shelf writes to instead of a store."""

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


@dataclass
class Stream:
    """A probed engine and the states that it captures for training."""

    engine: Engine
    spec: TargetSpec
    probed: Probed
    check: Check
    figures: list[Mapping[str, Any] | None] = field(default_factory=list)

    def capture(self, samples: Sequence[TokenizedSample]) -> Sequence[HiddenStates]:
        """Return the states of ``samples``, checked as extract does, of an engine that is still right.

        Raises: ContractError for wrong states or an engine that has drifted; EyasError for a failed sample.
        """
        window = _Window()
        shelf = Shelf(window, self.check, max_failures=0)
        try:
            for item in self.engine.capture(shelf.feed([(0, samples)])):
                shelf.put(item if isinstance(item, Failure) else owned(item, self.spec))
            shelf.finish()
        finally:
            shelf.close()
        # Before anything is learnt from them: a checkpoint could not be told from a good one afterwards.
        probe_again(self.engine, self.spec, self.probed)
        self.figures.append(window.figures)
        return window.states


@contextmanager
def streaming(context: RunContext, draft: DraftConfig) -> Iterator[tuple[Stream, StreamedStates]]:
    """Start and probe the engine for the train split; it is closed at the end.

    Raises: UserError for samples that do not fit in ``train.stream_bytes``, or a GPU too small for both.
    """
    config, spec = context.config, context.spec
    data = context.output_of(context.samples_stage)
    if facts_of(context, "extract")["inputs"]["samples"] != data:
        raise UserError(
            "the samples have changed since the held-out ones were captured",
            hint=f"run: eyas extract -c {config.run_dir / 'run.yaml'} --fresh",
        )
    check = make_check(context)
    samples = []
    for sample in read_samples(context.samples_folder, "train"):
        check(sample)
        samples.append(sample)
    _check_room(config, spec, samples)
    _check_gpu(context, draft, samples)
    engine = make_engine(context)
    try:
        examples = examples_of(samples)
        probed = probe_engine(context, engine, examples)
        stream = Stream(engine, spec, probed, check_of(context, engine, probed, examples))
        data_fingerprint = fingerprint([data, spec.fingerprint, "train"])
        states = StreamedStates(spec, samples, stream.capture, config.train.stream_bytes, data_fingerprint)
        yield stream, states
    finally:
        engine.close()


def check_stream(config: RunConfig) -> None:
    """Raises: UserError for settings that a stream cannot follow."""
    if config.train.source != "stream":
        return
    for key, is_set, why in (
        ("train.num_gpus", config.train.num_gpus > 1, "engine and trainer take turns in one process"),
        ("extract.fleet", config.extract.fleet is not None, "engine and trainer take turns in one process"),
        ("extract.max_failures", config.extract.max_failures > 0, "a batch cannot leave out a sample"),
        ("extract.states_dtype", config.extract.states_dtype != "auto", "nothing is stored in 8 bits"),
    ):
        if is_set:
            raise UserError(
                f"train.source=stream does not go with {key}: {why}",
                hint=f"leave {key} out, or store the states with train.source=store",
            )


def facts_of_stream(context: RunContext, stream: Stream, states: StreamedStates) -> dict[str, Any]:
    """Return what the stage records: who waited for whom since training last started, and the layers seen."""
    turns, ids = states.turns, (*context.spec.aux_layer_ids, context.spec.num_layers)
    engines = turns.engine_s / turns.trainer_s if turns.trainer_s else None
    if engines is not None:
        busy = f"{engines:.2g} engines would keep one trainer" if engines >= 1 else (
            f"one engine would keep {1 / max(engines, 1e-9):.2g} trainers"
        )  # fmt: skip
        say(
            f"train: {'engine' if engines >= 1 else 'trainer'}-bound: in {turns.num_windows} turns the "
            f"engine worked {turns.engine_s:.1f} s, the trainer {turns.trainer_s:.1f} s; "
            f"on devices of their own, {busy} busy"
        )
    return {
        "stream": {
            "engine_s": round(turns.engine_s, 3),
            "trainer_s": round(turns.trainer_s, 3),
            "num_windows": turns.num_windows,
            "num_tokens": turns.num_tokens,
            "peak_bytes": turns.peak_bytes,
            "engines_per_trainer": engines,
        },
        "layers": {"train": dict(zip(map(str, ids), table_of(stream.figures), strict=False))},
    }


def _check_room(config: RunConfig, spec: TargetSpec, samples: Sequence[TokenizedSample]) -> None:
    lengths = [len(s) for s in samples]
    tokens = max(min(config.train.batch_tokens, sum(lengths)), max(lengths, default=0))
    needed = tokens * spec.bytes_per_token
    if needed > config.train.stream_bytes:
        raise UserError(
            f"a batch of {tokens:,} tokens has up to {needed:,} bytes of states, "
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
