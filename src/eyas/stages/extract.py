"""extract: the target's hidden states for every sample, into a store."""

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from eyas.capture.capture_checks import check_states
from eyas.capture.checked_writer import Check, CheckedShardWriter
from eyas.capture.final_state_check import NUM_CALIBRATING, FinalStateCheck
from eyas.capture.import_samples import adopt
from eyas.capture.statistics import table_of
from eyas.data.prepared import SPLITS, Split, read_manifest, read_samples
from eyas.engines.base import Engine, ProbeOutput
from eyas.engines.checks import check_endpoint
from eyas.engines.probe import Probed, outside_envelope, probe, probe_again, probe_samples
from eyas.errors import ContractError, UserError
from eyas.files import fingerprint
from eyas.progress import Progress, say
from eyas.stages.run_context import RunContext, begin, finish, next_command
from eyas.stage_records import read_record
from eyas.store.manifest import StoreManifest, plan_shards, stored_bytes_per_token
from eyas.store.shards import ShardStore, ShardWriter, missing_shards
from eyas.targets.teacher import TeacherHead, read_teacher
from eyas.targets.weights import Weights
from eyas.types import TargetSpec, TokenizedSample

# A target of at most this size is also loaded into transformers, to compare the engine with.
REFERENCE_BYTES = 2 << 30
# Samples kept of each split to make the probe's from.
_NUM_EXAMPLES = 50


def extract(context: RunContext) -> None:
    """Probe the engine, capture what is missing shard by shard, probe again."""
    config = context.config
    check_endpoint(config)
    if config.extract.prepared_data is not None:
        adopt(context, config.extract.prepared_data)
    inputs = {
        "samples": context.output_of(context.samples_stage),
        "target": context.spec.to_json() | {"model": None, "revision": None},
        "extract": config.extract.model_dump(mode="json", include={"engine", "shard_bytes", "states_dtype"}),
    }
    if context.stored_splits != SPLITS:
        inputs["splits"] = list(context.stored_splits)
        say("extract: what is trained on is captured while training (train.source=stream); "
            "here, the held-out samples only")  # fmt: skip
        record = read_record(context.folder("extract"))
        if record is not None and "splits" not in record["inputs"] and not context.fresh:
            raise UserError(
                f"{context.folder('extract')} is for the states of all samples",
                hint="train on them with train.source=store, or name another run_dir",
            )
    manifest = read_manifest(context.samples_folder)
    for key in ("tokenizer_fingerprint", "template_fingerprint"):
        if manifest[key] != getattr(context.spec, key):
            raise UserError(
                f"{context.samples_folder} was made with another {key.removesuffix('_fingerprint')} "
                "than the target's",
                hint="prepare the data again for this target",
            )
    # The run's own folder is locked already; states elsewhere may be wanted by another run.
    elsewhere = config.extract.states_dir is not None
    with context.states_folder.lock() if elsewhere else nullcontext():
        if elsewhere and context.fresh:
            for split in context.stored_splits:
                (context.states_folder / split).clear()
        if not begin(context, "extract", inputs, lambda: _is_whole(context)):
            return
        works = [Work(context, split, manifest) for split in context.stored_splits]
        works_to_do = [work for work in works if work.missing]
        capture: Callable[[RunContext, list[Work]], object] = _capture
        if config.extract.fleet is not None:
            from eyas.capture.fleet import capture_with_fleet

            capture = capture_with_fleet
        if works_to_do:
            capture(context, works_to_do)
        _finish(context, works)


def _is_whole(context: RunContext) -> bool:
    """Whether all shards are there and are those that were recorded."""
    try:
        return not any(missing_shards(context.store(split).folder) for split in context.stored_splits)
    except (ContractError, UserError):
        return False


class Work:
    """One split: its store and the shards that are not there yet. Samples are read when they are needed."""

    def __init__(self, context: RunContext, split: Split, manifest: dict[str, Any], writer: str = "") -> None:
        self.split, self.source = split, context.samples_folder
        lengths, self.examples = _scan(context, split, manifest["counts"].get(f"{split}_samples", 0))
        self.num_tokens = sum(lengths)
        self.folder = context.states_folder / split
        extract = context.config.extract
        per_token = stored_bytes_per_token(context.spec, extract.states_dtype)
        self.bounds = plan_shards(lengths, per_token, extract.shard_bytes)
        data = fingerprint([manifest["fingerprint"], split])
        contract = StoreManifest(context.spec, data, self.bounds, extract.states_dtype)
        self.writer = ShardWriter(self.folder, contract, writer)
        self.missing = self.writer.missing()
        self._next_shard, self._samples = 0, read_samples(self.source, self.split)
        self.missing_tokens = sum(sum(lengths[self.bounds[n] : self.bounds[n + 1]]) for n in self.missing)

    def parts(self, shards: Iterable[int] | None = None) -> Iterator[tuple[int, list[TokenizedSample]]]:
        """Yield shards, by default the missing ones, with their samples.

        Ascending shards are read in one pass, which goes on where the last call ended.
        """
        for number in self.missing if shards is None else shards:
            if number < self._next_shard:
                self._next_shard, self._samples = 0, read_samples(self.source, self.split)
            start, end = self.bounds[number], self.bounds[number + 1]
            collections.deque(
                itertools.islice(self._samples, start - self.bounds[self._next_shard]), maxlen=0
            )
            self._next_shard = number + 1
            yield number, list(itertools.islice(self._samples, end - start))


def _scan(context: RunContext, split: Split, num_samples: int) -> tuple[list[int], list[TokenizedSample]]:
    """Check every sample; return their lengths, and some with the longest among them, to probe with."""
    check = make_check(context)
    lengths: list[int] = []
    examples: list[TokenizedSample] = []
    longest: TokenizedSample | None = None
    for sample in read_samples(context.samples_folder, split):
        check(sample)
        if len(lengths) % max(1, num_samples // _NUM_EXAMPLES) == 0:
            examples.append(sample)
        lengths.append(len(sample))
        if longest is None or len(sample) > len(longest):
            longest = sample
    return lengths, examples + ([longest] if longest is not None else [])


def examples_of(samples: Sequence[TokenizedSample]) -> list[TokenizedSample]:
    """Return some of ``samples`` to probe with, the longest among them."""
    longest = [max(samples, key=len)] if samples else []
    return [*samples[:: max(1, len(samples) // _NUM_EXAMPLES)], *longest]


def _capture(context: RunContext, works: list[Work]) -> None:
    config = context.config.extract
    engine = make_engine(context)
    try:
        samples = [s for work in works for s in work.examples]
        probed, check = probe_engine(context, engine, samples)
        num_failures = 0
        for work in works:
            num_failures += _capture_split(engine, work, check, config.max_failures - num_failures)
        probe_again(engine, context.spec, probed)
    finally:
        engine.close()


def make_engine(context: RunContext) -> Engine:
    config = context.config.extract
    settings: dict[str, Any] = {"batch_tokens": config.batch_tokens, "batch_size": config.batch_size}
    if config.endpoint is not None:
        settings["endpoint"] = config.endpoint
    engine: Engine = context.make_engine(config.engine, **settings)
    return engine


def probe_engine(
    context: RunContext, engine: Engine, samples: Sequence[TokenizedSample]
) -> tuple[Probed, Check]:
    """Start the engine and probe it; return what it showed, and the check of each sample's states."""
    started = time.monotonic()
    engine.probe_outputs([])  # some engines start when they are first asked
    say(f"extract: {context.config.extract.engine} started in {time.monotonic() - started:.0f} s; probing it")
    teacher = read_teacher(context.target_folder, context.spec)
    probed = _probed(context, engine, samples, teacher)
    return probed, _check_of(context.spec, engine, probed, samples, teacher)


def _probed(
    context: RunContext, engine: Engine, samples: Sequence[TokenizedSample], teacher: TeacherHead
) -> Probed:
    reference = None
    is_small = Weights(context.target_folder).num_bytes <= REFERENCE_BYTES
    if context.config.extract.engine != "transformers" and is_small:
        reference = context.make_engine("transformers")
    try:
        exact = teacher.to("cpu", torch.float32)
        logits = lambda last: exact.logits(last.float())  # noqa: E731
        probed = probe(engine, context.spec, probe_samples(samples), logits, reference)
    finally:
        if reference is not None:
            reference.close()
    say(
        f"extract: the engine passed the probe in {probed.seconds:.0f} s"
        + "".join(f"; {n}" for n in probed.notes)
    )
    return probed


def _check_of(
    spec: TargetSpec, engine: Engine, probed: Probed, samples: Sequence[TokenizedSample], teacher: TeacherHead
) -> Check:
    """Return the check of each sample's states against what the probe saw and the sample's own tokens.

    How well states predict those is measured on a few ``samples``, each computed alone.
    """
    alone = [
        dataclasses.replace(s, sample_id=f"probe-own-{i}")
        for i, s in enumerate(samples[:: max(1, len(samples) // NUM_CALIBRATING)])
    ]
    known = [w.states for s in alone for w in engine.probe_outputs([s]) if isinstance(w, ProbeOutput)]
    last_check = FinalStateCheck.calibrated(spec, teacher, known)
    if last_check.usual_misses is None:
        say("  the target does not predict the data's answers well enough to tell states by their tokens")
    outside = functools.partial(outside_envelope, envelope=probed.envelope[:-1])
    return functools.partial(check_states, spec=spec, outside=outside, last_check=last_check)


def _capture_split(engine: Engine, work: Work, check: Check, max_failures: int) -> int:
    """Capture the missing shards of one split; return how many samples failed."""
    shelf = CheckedShardWriter(work.writer, check, max_failures)
    # An engine that does not stream holds all it is given, so it is given one shard at a time.
    together = [work.parts()] if engine.streams else ([part] for part in work.parts())
    try:
        with Progress(f"extract {work.split}", work.missing_tokens, "tokens") as progress:
            started = time.monotonic()

            def note() -> str:
                rate = shelf.written_bytes / 2**20 / max(time.monotonic() - started, 1e-9)
                return f"{rate:,.0f} MiB/s to disk, engine waited {shelf.blocked_s:.1f} s for it"

            for parts in together:
                for item in engine.capture(shelf.feed(parts)):
                    shelf.put(item)
                    progress.advance(len(getattr(item, "sample", ())), note())
            shelf.finish()
            progress.advance(0, note())
    finally:
        shelf.close()
    return len(shelf.failures)


def _finish(context: RunContext, works: list[Work]) -> None:
    spec = context.spec
    stores = {work.split: ShardStore(work.folder) for work in works}
    records = {split: list(store.records.values()) for split, store in stores.items()}
    everything = [record for split in records for record in records[split]]
    size = sum(record.num_bytes for record in everything)
    tables = {split: table_of(r.figures for r in records[split]) for split in records}
    ids = (*spec.aux_layer_ids, spec.num_layers)
    fingerprints = {split: store.fingerprint for split, store in stores.items()}
    facts: dict[str, Any] = {
        "stores": fingerprints,
        "num_bytes": size,
        "num_failures": sum(len(record.failures) for record in everything),
        "layers": {s: dict(zip(map(str, ids), t, strict=False)) for s, t in tables.items()},
    }
    finish(context, "extract", fingerprints, **facts)
    num_tokens = sum(work.num_tokens for work in works)
    say(f"extract: {size / 2**20:,.0f} MiB of hidden states, {size / max(num_tokens, 1):,.0f} bytes a token")
    for layer_id, row in zip(ids, tables[works[0].split], strict=False):
        say(
            f"  layer {layer_id:>3}: min {row['min']:.4g}, max {row['max']:.4g}, "
            f"mean {row['mean']:.4g}, RMS {row['rms']:.4g}"
        )
    next_command(context, "extract")


def make_check(context: RunContext) -> Callable[[TokenizedSample], None]:
    """Return what refuses, before anything is loaded, a sample that no engine can compute."""
    spec, max_length = context.spec, context.config.data.max_length
    limit, name = min(
        (max_length, "data.max_length"), (spec.max_position_embeddings, "the target's positions")
    )

    def check(sample: TokenizedSample) -> None:
        if sample.input_ids.max() >= spec.vocab_size:
            raise UserError(
                f"sample {sample.sample_id} has token id {sample.input_ids.max()}, "
                f"the target only {spec.vocab_size}",
                hint="the ids are another tokenizer's: prepare the data again for this target",
            )
        if len(sample) > limit:
            raise UserError(
                f"sample {sample.sample_id} has {len(sample)} tokens, more than {name} ({limit})",
                hint="prepare the data again with a smaller data.max_length"
                if name != "data.max_length"
                else f"set data.max_length={len(sample)} (--max-seq-len)",
            )

    return check
