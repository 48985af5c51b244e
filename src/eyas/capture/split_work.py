"""One split to be captured: its store, and the shards that are missing from it."""

import collections
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from eyas.capture.capture_run import CaptureRun
from eyas.capture.sample_checks import make_sample_check, scan
from eyas.data.prepared import Split, read_samples
from eyas.files import fingerprint
from eyas.store.manifest import StoreManifest, plan_shards, stored_bytes_per_token
from eyas.store.shards import ShardWriter
from eyas.types import TokenizedSample


class SplitWork:
    """The store of one split and its missing shards. Samples are read when they are needed."""

    def __init__(self, run: CaptureRun, split: Split, manifest: dict[str, Any], writer: str = "") -> None:
        """``manifest`` is that of the samples; ``writer`` names the journal where several write.

        Raises: UserError for a sample that no engine can compute.
        """
        self.split, self.source = split, run.samples_folder
        lengths, self.examples = scan(
            read_samples(self.source, split),
            make_sample_check(run.spec, run.max_length),
            manifest["counts"].get(f"{split}_samples", 0),
        )
        self.num_tokens = sum(lengths)
        self.folder = run.states_folder / split
        per_token = stored_bytes_per_token(run.spec, run.settings.states_dtype)
        self.bounds = plan_shards(lengths, per_token, run.settings.shard_bytes)
        data = fingerprint([manifest["fingerprint"], split])
        contract = StoreManifest(run.spec, data, self.bounds, run.settings.states_dtype)
        self.writer = ShardWriter(self.folder, contract, writer)
        self.missing = self.writer.missing()
        self._next_shard, self._samples = 0, read_samples(self.source, self.split)
        self.missing_tokens = sum(sum(lengths[self.bounds[n] : self.bounds[n + 1]]) for n in self.missing)

    def shards(self, numbers: Iterable[int] | None = None) -> Iterator[tuple[int, list[TokenizedSample]]]:
        """Yield shards, by default the missing ones, with their samples.

        Ascending shards are read in one pass, which continues where the last call ended.
        """
        for number in self.missing if numbers is None else numbers:
            if number < self._next_shard:
                self._next_shard, self._samples = 0, read_samples(self.source, self.split)
            start, end = self.bounds[number], self.bounds[number + 1]
            collections.deque(
                itertools.islice(self._samples, start - self.bounds[self._next_shard]), maxlen=0
            )
            self._next_shard = number + 1
            yield number, list(itertools.islice(self._samples, end - start))
