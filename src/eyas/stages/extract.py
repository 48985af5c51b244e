"""extract: the target's hidden states for every sample, into a store."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from eyas.capture.fleet import capture_with_fleet
from eyas.capture.in_process import capture_in_process
from eyas.capture.split_work import SplitWork
from eyas.capture.statistics import table_of
from eyas.data.prepared import SPLITS, Split, read_manifest
from eyas.errors import ContractError, UserError
from eyas.progress import say
from eyas.run_folder import read_record
from eyas.stages.capture_run import capture_run
from eyas.stages.import_samples import import_prepared
from eyas.stages.run_context import RunContext, begin, finish, next_command
from eyas.store.shards import ShardStore, missing_shards


def extract(context: RunContext) -> None:
    """Probe the engine, capture what is missing shard by shard, probe again."""
    settings = context.config.extract
    if settings.prepared_data is not None:
        import_prepared(context, settings.prepared_data)
    inputs = _inputs(context)
    manifest = _samples_manifest(context)
    # The run's own folder is locked already; states elsewhere may be wanted by another run.
    elsewhere = settings.states_dir is not None
    states_folder = context.states_folder
    with states_folder.lock() if elsewhere else nullcontext():
        if not begin(context, "extract", inputs, lambda: _is_whole(context)):
            return
        run = capture_run(context)
        works = [SplitWork(run, split, manifest) for split in run.splits]
        capture = capture_in_process if settings.fleet is None else capture_with_fleet
        if missing := [work for work in works if work.missing]:
            capture(run, missing)
        stores = {work.split: ShardStore(work.folder) for work in works}
        if context.redoes_states_elsewhere:
            for split in stores:
                (states_folder / split).take(context.states_folder / split)
        _finish(context, works, stores)


def _inputs(context: RunContext) -> dict[str, Any]:
    """Return what the states are made from.

    Raises: UserError where the states of all samples are stored and training wants a stream.
    """
    settings = context.config.extract
    inputs: dict[str, Any] = {
        "samples": context.output_of(context.samples_stage),
        "target": context.spec.to_json() | {"model": None, "revision": None},
        "extract": settings.model_dump(mode="json", include={"engine", "shard_bytes", "states_dtype"}),
    }
    if context.stored_splits == SPLITS:
        return inputs
    say(
        "extract: what is trained on is captured while training (train.source=stream); "
        "here, the held-out samples only"
    )
    record = read_record(context.folder("extract"))
    if record is not None and "splits" not in record["inputs"] and "extract" not in context.fresh:
        raise UserError(
            f"{context.folder('extract')} is for the states of all samples",
            hint="train on them with train.source=store, or name another run_dir",
        )
    return inputs | {"splits": list(context.stored_splits)}


def _samples_manifest(context: RunContext) -> dict[str, Any]:
    """Return the manifest of the samples. Raises: UserError where they were made for another target."""
    manifest = read_manifest(context.samples_folder)
    for key in ("tokenizer_fingerprint", "template_fingerprint"):
        if manifest[key] != getattr(context.spec, key):
            raise UserError(
                f"{context.samples_folder} was made with another {key.removesuffix('_fingerprint')} "
                "than the target's",
                hint="prepare the data again for this target",
            )
    return manifest


def _is_whole(context: RunContext) -> bool:
    """Whether all shards that are still needed exist and are those that were recorded."""
    try:
        stores = {split: context.store(split) for split in context.stored_splits}
        freed = "train" in stores and not stores["train"].folder.names("*.safetensors")
        if freed and context.states()["train"].state == "done":
            say("extract: the states to train on were freed, and nothing needs them")
            del stores["train"]
        return not any(missing_shards(store.folder) for store in stores.values())
    except (ContractError, UserError):
        return False


def _finish(context: RunContext, works: Sequence[SplitWork], stores: Mapping[Split, ShardStore]) -> None:
    spec = context.spec
    records = {split: list(store.records.values()) for split, store in stores.items()}
    everything = [record for split in records for record in records[split]]
    size = sum(record.num_bytes for record in everything)
    tables = {split: table_of(r.figures for r in records[split]) for split in records}
    ids = (*spec.aux_layer_ids, spec.num_layers)
    fingerprints = {split: store.fingerprint for split, store in stores.items()}
    facts: Mapping[str, Any] = {
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
