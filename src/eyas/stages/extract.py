"""extract: the target's hidden states for every sample, into a store."""

from pathlib import Path
from typing import Any

from eyas.data.prepared import SPLITS, read_manifest, read_samples
from eyas.errors import ContractError, EyasError, UserError
from eyas.files import fingerprint
from eyas.progress import Progress, say
from eyas.stages.context import RunContext, begin, finish, next_command
from eyas.store.manifest import StoreManifest, plan_shards
from eyas.store.shards import ShardStore, ShardWriter, missing_shards
from eyas.types import Failure, HiddenStates, TokenizedSample


def extract(context: RunContext) -> None:
    """Capture shard by shard; a shard that is already complete is not computed again."""
    config = context.config
    inputs = {
        "samples": context.output_of(context.samples_stage),
        "target": context.spec.to_json() | {"model": None, "revision": None},
        "extract": config.extract.model_dump(mode="json", exclude={"batch_tokens", "max_failures"}),
    }
    manifest = read_manifest(context.samples_folder)
    for key in ("tokenizer_fingerprint", "template_fingerprint"):
        if manifest[key] != getattr(context.spec, key):
            raise UserError(
                f"{context.samples_folder} was made with another {key.removesuffix('_fingerprint')} "
                "than the target's",
                hint="prepare the data again for this target",
            )
    stores = [context.folder("extract") / split for split in SPLITS]
    if not begin(context, "extract", inputs, lambda: not any(missing_shards(s) for s in stores)):
        return
    fingerprints = {}
    engine = None
    failures: list[Failure] = []
    try:
        for split in SPLITS:
            samples = list(read_samples(context.samples_folder, split))
            _check_ids(samples, context.spec.vocab_size)
            store = context.folder("extract") / split
            bounds = plan_shards(
                [len(s) for s in samples], context.spec.bytes_per_token, config.extract.shard_bytes
            )
            data = fingerprint([manifest["fingerprint"], split])
            writer = ShardWriter(store, StoreManifest(context.spec, data, bounds))
            missing = writer.missing()
            if missing and engine is None:
                engine = context.make_engine(config.extract.engine, batch_tokens=config.extract.batch_tokens)
            num_tokens = sum(len(s) for shard in missing for s in samples[bounds[shard] : bounds[shard + 1]])
            with Progress(f"extract {split}", num_tokens, "tokens") as progress:
                for shard in missing:
                    part = samples[bounds[shard] : bounds[shard + 1]]
                    states, failed = _capture(engine, part, progress)
                    failures += failed
                    if len(failures) > config.extract.max_failures:
                        first = failures[0]
                        raise EyasError(
                            f"{len(failures)} samples failed, more than extract.max_failures="
                            f"{config.extract.max_failures}; first: {first.sample_id}: {first.reason}",
                            hint="complete shards are kept; mend the cause and run the same command again",
                        )
                    writer.write(shard, states, failed)
            fingerprints[split] = ShardStore(store).fingerprint
    finally:
        if engine is not None:
            engine.close()
    size = sum(p.stat().st_size for p in Path(context.folder("extract")).rglob("*.safetensors"))
    finish(context, "extract", fingerprints, num_bytes=size, num_failures=len(failures))
    say(f"extract: {size / 2**20:,.0f} MiB of hidden states at aux layers {list(context.spec.aux_layer_ids)}")
    next_command(context, "extract")


def _capture(
    engine: Any, samples: list[TokenizedSample], progress: Progress
) -> tuple[list[HiddenStates], list[Failure]]:
    """Run the engine on one shard's samples; exactly one item must come out for each, and be sound."""
    by_id: dict[str, HiddenStates] = {}
    failures: list[Failure] = []
    wanted = {s.sample_id: s for s in samples}
    for item in engine.capture(samples):
        if isinstance(item, Failure):
            failures.append(item)
            continue
        sample_id = item.sample.sample_id
        if sample_id in by_id or sample_id not in wanted:
            raise ContractError(f"the engine returned sample {sample_id} twice or unasked")
        check_states(item, wanted[sample_id])
        by_id[sample_id] = item
        progress.advance(len(item.sample))
    lost = wanted.keys() - by_id.keys() - {f.sample_id for f in failures}
    if lost:
        raise ContractError(f"the engine lost {len(lost)} samples, such as {min(lost)}")
    return [by_id[s.sample_id] for s in samples if s.sample_id in by_id], failures


def check_states(states: HiddenStates, sample: TokenizedSample) -> None:
    """Refuse states that cannot be this sample's.

    Raises: ContractError for other tokens than those sent, values that are not finite, or a layer
    that is all zero.
    """
    if not (states.sample.input_ids == sample.input_ids).all():
        raise ContractError(f"sample {sample.sample_id}: the engine echoed other token ids than it was sent")
    for name, values in (("aux", states.aux), ("last", states.last)):
        if not values.isfinite().all():
            raise ContractError(f"sample {sample.sample_id}: {name} states are not finite")
    empty = [i for i in range(states.aux.shape[1]) if not states.aux[:, i].any()]
    if empty or not states.last.any():
        what = f"aux layer number {empty[0]}" if empty else "the last layer"
        raise ContractError(f"sample {sample.sample_id}: {what} is all zero")


def _check_ids(samples: list[TokenizedSample], vocab_size: int) -> None:
    for sample in samples:
        if sample.input_ids.max() >= vocab_size:
            raise ContractError(
                f"sample {sample.sample_id} has token id {sample.input_ids.max()}, the target only {vocab_size}"
            )
