"""extract: the target's hidden states for every sample, into a store."""

import functools
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from eyas.data.prepared import SPLITS, read_manifest, read_samples
from eyas.engines.base import Engine
from eyas.engines.probe import Probed, outside_envelope, probe, probe_again, probe_samples
from eyas.errors import ContractError, UserError
from eyas.files import fingerprint
from eyas.progress import Progress, say
from eyas.stages.adopt import adopt
from eyas.stages.context import RunContext, begin, finish, next_command
from eyas.stages.shelf import Check, Shelf, check_states
from eyas.stages.statistics import read_table
from eyas.store.manifest import StoreManifest, plan_shards
from eyas.store.shards import ShardStore, ShardWriter, missing_shards
from eyas.targets.teacher import read_teacher
from eyas.types import TokenizedSample

# A target of at most this size is also loaded into transformers, to compare the engine with.
REFERENCE_BYTES = 2 << 30


def extract(context: RunContext) -> None:
    """Probe the engine, capture what is missing shard by shard, probe again."""
    config = context.config
    if config.extract.prepared_data is not None:
        adopt(context, config.extract.prepared_data)
    inputs = {
        "samples": context.output_of(context.samples_stage),
        "target": context.spec.to_json() | {"model": None, "revision": None},
        "extract": config.extract.model_dump(mode="json", include={"engine", "shard_bytes"}),
    }
    manifest = read_manifest(context.samples_folder)
    for key in ("tokenizer_fingerprint", "template_fingerprint"):
        if manifest[key] != getattr(context.spec, key):
            raise UserError(
                f"{context.samples_folder} was made with another {key.removesuffix('_fingerprint')} "
                "than the target's",
                hint="prepare the data again for this target",
            )
    samples = {split: list(read_samples(context.samples_folder, split)) for split in SPLITS}
    _check_samples([s for split in SPLITS for s in samples[split]], context)
    stores = [context.folder("extract") / split for split in SPLITS]
    if not begin(context, "extract", inputs, lambda: not any(missing_shards(s) for s in stores)):
        return
    works = [Work(context, split, samples[split], manifest["fingerprint"]) for split in SPLITS]
    works_to_do = [work for work in works if work.missing]
    capture = _capture
    if config.extract.fleet is not None:
        from eyas.stages.extract_fleet import capture_with_fleet as capture
    num_failures = capture(context, works_to_do) if works_to_do else 0
    _finish(context, works, num_failures)


class Work:
    """One split: its store and the shards that are not there yet."""

    def __init__(
        self, context: RunContext, split: str, samples: list[TokenizedSample], data_fingerprint: str
    ) -> None:
        self.split, self.samples = split, samples
        self.folder = context.folder("extract") / split
        self.bounds = plan_shards(
            [len(s) for s in samples], context.spec.bytes_per_token, context.config.extract.shard_bytes
        )
        data = fingerprint([data_fingerprint, split])
        self.writer = ShardWriter(self.folder, StoreManifest(context.spec, data, self.bounds))
        self.missing = self.writer.missing()

    def part(self, shard: int) -> list[TokenizedSample]:
        return self.samples[self.bounds[shard] : self.bounds[shard + 1]]


def _capture(context: RunContext, works: list[Work]) -> int:
    """Return how many samples failed."""
    config = context.config.extract
    engine: Engine = context.make_engine(
        config.engine, batch_tokens=config.batch_tokens, batch_size=config.batch_size
    )
    try:
        probed = probe_engine(context, engine, [s for work in works for s in work.samples])
        num_failures = 0
        for work in works:
            num_failures += _capture_split(engine, work, probed, config.max_failures - num_failures)
        probe_again(engine, context.spec, probed)
    finally:
        engine.close()
    return num_failures


def probe_engine(context: RunContext, engine: Engine, samples: list[TokenizedSample]) -> Probed:
    spec = context.spec
    started = time.monotonic()
    engine.witness([])  # some engines start when they are first asked
    say(f"extract: {context.config.extract.engine} started in {time.monotonic() - started:.0f} s; probing it")
    reference = None
    size = sum(p.stat().st_size for p in context.target_folder.glob("*.safetensors"))
    if context.config.extract.engine != "transformers" and size <= REFERENCE_BYTES:
        reference = context.make_engine("transformers")
    try:
        teacher = read_teacher(context.target_folder, spec).to("cpu", torch.float32)
        logits = lambda last: teacher.logits(last.float())  # noqa: E731
        probed = probe(engine, spec, probe_samples(samples), logits, reference)
    finally:
        if reference is not None:
            reference.close()
    say(
        f"extract: the engine passed the probe in {probed.seconds:.0f} s"
        + "".join(f"; {n}" for n in probed.notes)
    )
    return probed


def _capture_split(engine: Engine, work: Work, probed: Probed, max_failures: int) -> int:
    """Capture the missing shards of one split; return how many samples failed."""
    shelf = Shelf(work.writer, {n: work.part(n) for n in work.missing}, check_of(probed), max_failures)
    num_tokens = sum(len(s) for n in work.missing for s in work.part(n))
    # An engine that does not stream holds all it is given, so it is given one shard at a time.
    together = [work.missing] if engine.streams else [[n] for n in work.missing]
    try:
        with Progress(f"extract {work.split}", num_tokens, "tokens") as progress:
            started = time.monotonic()
            for shards in together:
                for item in engine.capture(_samples_of(work, shards)):
                    shelf.put(item)
                    rate = shelf.written_bytes / 2**20 / max(time.monotonic() - started, 1e-9)
                    note = f"{rate:,.0f} MiB/s to disk, engine waited {shelf.blocked_s:.1f} s for it"
                    progress.advance(len(getattr(item, "sample", ())), note)
            shelf.finish()
    finally:
        shelf.close()
    return len(shelf.failures)


def check_of(probed: Probed) -> Check:
    """Return the check of each sample's states against what the probe saw."""
    return functools.partial(
        check_states, outside=functools.partial(outside_envelope, envelope=probed.envelope[:-1])
    )


def _samples_of(work: Work, shards: list[int]) -> Iterator[TokenizedSample]:
    return itertools.chain.from_iterable(work.part(n) for n in shards)


def _finish(context: RunContext, works: list[Work], num_failures: int) -> None:
    spec = context.spec
    fingerprints = {work.split: ShardStore(work.folder).fingerprint for work in works}
    size = sum(p.stat().st_size for p in Path(context.folder("extract")).rglob("*.safetensors"))
    tables = {work.split: read_table(work.folder) for work in works}
    ids = (*spec.aux_layer_ids, spec.num_layers)
    facts: dict[str, Any] = {
        "num_bytes": size,
        "num_failures": num_failures,
        "layers": {s: dict(zip(map(str, ids), t, strict=False)) for s, t in tables.items()},
    }
    finish(context, "extract", fingerprints, **facts)
    num_tokens = sum(len(s) for work in works for s in work.samples)
    say(f"extract: {size / 2**20:,.0f} MiB of hidden states, {size / max(num_tokens, 1):,.0f} bytes a token")
    for layer_id, row in zip(ids, tables["train"], strict=False):
        say(
            f"  layer {layer_id:>3}: min {row['min']:.4g}, max {row['max']:.4g}, "
            f"mean {row['mean']:.4g}, RMS {row['rms']:.4g}"
        )
    next_command(context, "extract")


def _check_samples(samples: list[TokenizedSample], context: RunContext) -> None:
    """Refuse before anything is loaded what no engine can compute."""
    spec, max_length = context.spec, context.config.data.max_length
    limit, name = min(
        (max_length, "data.max_length"), (spec.max_position_embeddings, "the target's positions")
    )
    for sample in samples:
        if sample.input_ids.max() >= spec.vocab_size:
            raise ContractError(
                f"sample {sample.sample_id} has token id {sample.input_ids.max()}, "
                f"the target only {spec.vocab_size}"
            )
        if len(sample) > limit:
            raise UserError(
                f"sample {sample.sample_id} has {len(sample)} tokens, more than {name} ({limit})",
                hint="prepare the data again with a smaller data.max_length"
                if name != "data.max_length"
                else f"set data.max_length={len(sample)} (--max-seq-len)",
            )
