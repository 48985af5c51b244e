"""What capturing needs of a run, taken from its context: for extract, a stream and the actors of a fleet."""

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from eyas.capture.capture_run import Actors, CaptureRun
from eyas.capture.fleet import for_actors
from eyas.capture.stream import Stream, check_gpu, streaming
from eyas.config.load import LoadedConfig
from eyas.drafters.base import DraftConfig
from eyas.engines.base import Engine
from eyas.engines.checks import check_engine_a_rank
from eyas.errors import UserError
from eyas.plan.estimates import PlannedDraft, training_memory
from eyas.plan.target_size import read_target_size
from eyas.stages.run_context import RunContext, facts_of
from eyas.store.storage import folder_of
from eyas.targets.weights import Weights
from eyas.train.ranks import Ranks

# A target of at most this size is also loaded into transformers, to compare the engine with.
REFERENCE_BYTES = 2 << 30


def capture_run(context: RunContext) -> CaptureRun:
    """Return the run as ``eyas.capture`` takes it."""
    config = context.config
    actors = None
    if config.extract.fleet is not None:
        # An actor does not know that a stage is being done again, next to its output.
        make_run = functools.partial(_in_actor, for_actors(context.loaded), str(context.states_folder))
        actors = Actors(config.ray.address, make_run)
    return CaptureRun(
        spec=context.spec,
        target_folder=context.target_folder,
        samples_folder=context.samples_folder,
        states_folder=context.states_folder,
        splits=context.stored_splits,
        settings=config.extract,
        max_length=config.data.max_length,
        make_engine=functools.partial(make_engine, context),
        make_reference=functools.partial(make_reference, context),
        actors=actors,
    )


def make_engine(context: RunContext) -> Engine:
    """Make the engine that extract is configured with."""
    config = context.config.extract
    settings: dict[str, Any] = {"batch_tokens": config.batch_tokens, "batch_size": config.batch_size}
    if config.endpoint is not None:
        settings["endpoint"] = config.endpoint
    engine: Engine = context.make_engine(config.engine, **settings)
    return engine


def make_reference(context: RunContext) -> Engine | None:
    """Make a transformers engine to compare with: where the engine is another one and the target is small."""
    is_small = Weights(context.target_folder).num_bytes <= REFERENCE_BYTES
    if context.config.extract.engine == "transformers" or not is_small:
        return None
    engine: Engine = context.make_engine("transformers")
    return engine


def _in_actor(loaded: LoadedConfig, states_folder: str) -> CaptureRun:
    return dataclasses.replace(capture_run(RunContext(loaded)), states_folder=folder_of(states_folder))


@contextmanager
def open_stream(context: RunContext, draft: DraftConfig, ranks: Ranks) -> Iterator[Stream]:
    """Open the train split as a stream.

    Raises: UserError for samples that have changed; further as ``streaming``.
    """
    config = context.config
    samples = context.output_of(context.samples_stage)
    if facts_of(context, "extract")["inputs"]["samples"] != samples:
        raise UserError(
            "the samples have changed since the held-out ones were captured",
            hint=f"run: eyas extract -c {config.run_dir / 'run.yaml'} --fresh",
        )
    check_engine_a_rank(config, ranks.size)
    on_gpu = context.train_device == "cuda"

    def training_bytes(supervised_share: float) -> float:
        planned = PlannedDraft(context.drafter, draft)
        size = read_target_size(config.target, context.default_aux_layer_ids)
        return training_memory(config, planned, size, supervised_share)

    with streaming(
        capture_run(context),
        config.train,
        functools.partial(context.drafter.cost_of, settings=config.draft),
        ranks,
        seed=config.seed,
        samples_fingerprint=samples,
        fresh="train" in context.fresh,
        on_gpu=on_gpu,
        check_gpu=functools.partial(check_gpu, config, on_gpu, training_bytes),
    ) as stream:
        yield stream
