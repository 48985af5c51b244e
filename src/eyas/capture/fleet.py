"""extract on several engines at once: each in an actor of Ray, all writing shards of the same store."""

import dataclasses
import functools
import queue
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import eyas
from eyas.capture.checked_writer import CheckedShardWriter
from eyas.config.load import LoadedConfig
from eyas.config.schema import RunConfig
from eyas.data.prepared import Split, read_manifest
from eyas.engines.checks import check_fleet
from eyas.engines.info import engine_info
from eyas.engines.probe import probe_again
from eyas.errors import EyasError
from eyas.files import fingerprint
from eyas.progress import Progress, say
from eyas.scale.cluster import check_room, cluster
from eyas.stages.extract import Work, make_engine, probe_engine
from eyas.stages.run_context import RunContext
from eyas.store.journal import ShardRecord


class Unit(NamedTuple):
    """A shard that one engine captures and writes."""

    split: Split
    shard: int

    def __str__(self) -> str:
        return f"{self.split} shard {self.shard}"


def capture_with_fleet(context: RunContext, works: Sequence[Work]) -> int:
    """Capture what is missing with ``extract.fleet``; return how many samples failed."""
    config = context.config
    fleet = config.extract.fleet
    assert fleet is not None
    check_fleet(config)
    units = [Unit(work.split, shard) for work in works for shard in work.missing]
    num_tokens = sum(work.missing_tokens for work in works)
    make = functools.partial(ExtractWorker, for_actors(context.loaded))
    num_failures = 0
    with cluster(config.ray.address, fleet.replicas):
        from eyas.scale.fleet import Fleet

        check_room(fleet)
        running = Fleet(units, make, fleet, common_facts(context))
        say(f"extract: {len(units)} shards for {fleet.replicas} engines; each is probed when it starts")
        with Progress("extract", num_tokens, "tokens") as progress:
            for unit, record in running.results():
                num_failures += len(record.failures)
                if num_failures > config.extract.max_failures:
                    name, reason = record.failures[0]
                    raise EyasError(
                        f"{num_failures} samples failed, more than extract.max_failures="
                        f"{config.extract.max_failures}; the last: {name}: {reason}",
                        hint="complete shards are kept; mend the cause and run the same command again",
                    )
                progress.advance(record.num_tokens, f"{unit} done, {running.num_deaths} engines lost")
    return num_failures


def for_actors(loaded: LoadedConfig) -> LoadedConfig:
    """Return the run as an actor reads it: paths absolute, the engine as it starts within an actor."""
    config: RunConfig = engine_info(loaded.config.extract.engine).in_actor(loaded.config)
    folder = Path(config.target.model)
    model = str(folder.resolve()) if folder.is_dir() else config.target.model
    changes = {
        "run_dir": config.run_dir.resolve(),
        "target": config.target.model_copy(update={"model": model}),
    }
    return dataclasses.replace(loaded, config=config.model_copy(update=changes))


def common_facts(context: RunContext) -> Mapping[str, str]:
    """Return what every machine of the fleet must have in common, by name."""
    stores = [context.states_folder / split for split in context.stored_splits]
    seen = [
        fingerprint(store.read("manifest.json").decode())[:8] if store.size("manifest.json") else "nothing"
        for store in stores
    ]
    return {
        "eyas": eyas.__version__,
        "torch": torch.__version__,
        "the target": context.spec.fingerprint,
        f"what {context.states_folder} holds": ", ".join(seen),
    }


def _journal_of(name: str) -> str:
    """Each engine writes a journal of its own."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")


class ExtractWorker:
    """One engine of the fleet; it starts with the first shards it is given, and is probed then."""

    def __init__(self, loaded: LoadedConfig, name: str) -> None:
        self.context = RunContext(loaded)
        self.name = name
        self.works: dict[Split, Work] = {}

    def facts(self) -> Mapping[str, str]:
        return common_facts(self.context)

    def do(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, ShardRecord]]:
        if not self.works:
            self._start()
        for split in self.context.stored_splits:
            shards = [unit.shard for unit in units if unit.split == split]
            # An engine that does not stream holds all it is given, so it is given one shard at a time.
            for together in [shards] if self.engine.streams else [[n] for n in shards]:
                for record in self._capture(split, together):
                    yield Unit(split, record.shard), record

    def close(self) -> None:
        if self.works:
            probe_again(self.engine, self.context.spec, self.probed)
            self.engine.close()

    def _start(self) -> None:
        manifest = read_manifest(self.context.samples_folder)
        works = {
            split: Work(self.context, split, manifest, _journal_of(self.name))
            for split in self.context.stored_splits
        }
        self.engine = make_engine(self.context)
        examples = [s for work in works.values() for s in work.examples]
        self.probed, self.check = probe_engine(self.context, self.engine, examples)
        self.works = works

    def _capture(self, split: Split, shards: Sequence[int]) -> Iterator[ShardRecord]:
        if not shards:
            return
        work = self.works[split]
        shelf = CheckedShardWriter(work.writer, self.check, self.context.config.extract.max_failures)
        try:
            for item in self.engine.capture(shelf.feed(work.parts(shards))):
                shelf.put(item)
                yield from _drained(shelf.written)
            shelf.finish()
            yield from _drained(shelf.written)
        finally:
            shelf.close()


def _drained(written: "queue.SimpleQueue[ShardRecord]") -> Iterator[ShardRecord]:
    while not written.empty():
        yield written.get()
