"""extract on several engines at once: each in an actor of Ray, all writing shards of the same store."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import eyas
from eyas.capture.capture_run import CaptureRun
from eyas.capture.checked_writer import CheckedShardWriter, capture_into
from eyas.capture.probed_engine import ProbedEngine
from eyas.capture.split_work import SplitWork
from eyas.config.load import LoadedConfig
from eyas.config.schema import RunConfig
from eyas.data.prepared import Split, read_manifest
from eyas.engines.info import engine_info
from eyas.errors import EyasError
from eyas.files import fingerprint
from eyas.progress import Progress, say
from eyas.scale.cluster import check_room, cluster
from eyas.store.journal import ShardRecord


class Unit(NamedTuple):
    """A shard that one engine captures and writes."""

    split: Split
    shard: int

    def __str__(self) -> str:
        return f"{self.split} shard {self.shard}"


def capture_with_fleet(run: CaptureRun, works: Sequence[SplitWork]) -> None:
    """Capture what is missing with ``extract.fleet``.

    Raises: EyasError when more samples fail than may, or engines keep dying.
    """
    fleet, actors, max_failures = run.settings.fleet, run.actors, run.settings.max_failures
    assert fleet is not None
    assert actors is not None
    units = [Unit(work.split, shard) for work in works for shard in work.missing]
    num_tokens = sum(work.missing_tokens for work in works)
    num_failures = 0
    with cluster(actors.address, fleet.replicas):
        from eyas.scale.fleet import Fleet

        check_room(fleet)
        running = Fleet(units, functools.partial(ExtractWorker, actors.make_run), fleet, common_facts(run))
        say(f"extract: {len(units)} shards for {fleet.replicas} engines; each is probed when it starts")
        with Progress("extract", num_tokens, "tokens") as progress:
            for unit, record in running.results():
                num_failures += len(record.failures)
                if num_failures > max_failures:
                    name, reason = record.failures[0]
                    raise EyasError(
                        f"{num_failures} samples failed, more than extract.max_failures={max_failures}; "
                        f"the last: {name}: {reason}",
                        hint="complete shards are kept; mend the cause and run the same command again",
                    )
                progress.advance(record.num_tokens, f"{unit} done, {running.num_deaths} engines lost")


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


def common_facts(run: CaptureRun) -> Mapping[str, str]:
    """Return what every machine of the fleet must have in common, by name."""
    stores = [run.states_folder / split for split in run.splits]
    seen = [
        fingerprint(store.read("manifest.json").decode())[:8] if store.size("manifest.json") else "nothing"
        for store in stores
    ]
    return {
        "eyas": eyas.__version__,
        "torch": torch.__version__,
        "the target": run.spec.fingerprint,
        f"what {run.states_folder} holds": ", ".join(seen),
    }


class ExtractWorker:
    """One engine of the fleet; it starts with the first shards it is given, and is probed then."""

    def __init__(self, make_run: Callable[[], CaptureRun], name: str) -> None:
        self.run = make_run()
        # Each engine writes a separate journal.
        self.journal = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
        self.works: dict[Split, SplitWork] = {}

    def facts(self) -> Mapping[str, str]:
        return common_facts(self.run)

    def do(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, ShardRecord]]:
        if not self.works:
            self._start()
        for split in self.run.splits:
            shards = [unit.shard for unit in units if unit.split == split]
            if shards:
                for record in self._capture(self.works[split], shards):
                    yield Unit(split, record.shard), record

    def close(self) -> None:
        if self.works:
            self.engine.probe_again()
            self.engine.close()

    def _start(self) -> None:
        manifest = read_manifest(self.run.samples_folder)
        works = {split: SplitWork(self.run, split, manifest, self.journal) for split in self.run.splits}
        self.engine = ProbedEngine(self.run, [s for work in works.values() for s in work.examples])
        self.works = works

    def _capture(self, work: SplitWork, shards: Sequence[int]) -> Iterator[ShardRecord]:
        max_failures = self.run.settings.max_failures
        with CheckedShardWriter(work.writer, self.engine.check, max_failures) as writer:
            for _ in capture_into(writer, self.engine.engine, work.shards(shards)):
                yield from writer.drain()
            yield from writer.drain()
