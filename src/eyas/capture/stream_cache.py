"""States that a stream captured, kept for later epochs and later runs: a store in the order of training."""

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from eyas.capture.windows import Unit
from eyas.errors import ContractError, UserError
from eyas.files import fingerprint
from eyas.store.manifest import StoreManifest
from eyas.store.shards import ShardStore, ShardWriter, missing_shards
from eyas.store.storage import Folder
from eyas.train.ranks import Ranks
from eyas.types import HiddenStates, TargetSpec, TokenizedSample

FOLDER = "train_streamed"
# How long a file system may take to show one machine what another one has written.
_SHOWN_WITHIN_S = 120.0


class KeptStates:
    """A StateReader over the kept states of ``samples``, in their order; whole stores only.

    Each sample is compared with what is stored under its id before its states are given.
    """

    def __init__(self, store: ShardStore, samples: Sequence[TokenizedSample], fingerprint: str) -> None:
        self.spec, self.fingerprint = store.spec, fingerprint
        self._store, self._samples = store, samples
        self._places = {store.sample(i).sample_id: i for i in range(len(store.lengths))}
        if self._places.keys() != {s.sample_id for s in samples}:
            raise UserError(f"{store.folder} keeps the states of other samples", hint="delete it")

    @property
    def lengths(self) -> Sequence[int]:
        return [len(s) for s in self._samples]

    def sample(self, index: int) -> TokenizedSample:
        return self._samples[index]

    @property
    def figures(self) -> list[Mapping[str, Any] | None]:
        return [record.figures for record in self._store.records.values()]

    def read(self, index: int) -> HiddenStates:
        return self.of(self._samples[index])

    def of(self, sample: TokenizedSample) -> HiddenStates:
        states = self._store.read(self._places[sample.sample_id])
        same = (
            np.array_equal(states.sample.input_ids, sample.input_ids)
            and np.array_equal(states.sample.loss_mask, sample.loss_mask)
            and states.sample.cut == sample.cut
        )
        if not same:
            raise ContractError(
                f"{self._store.folder} keeps other tokens under the id {sample.sample_id}", hint="delete it"
            )
        return states


class StreamCache:
    """Writes the units of the first epoch, each a shard, and reads them once all are there.

    Of several ranks each writes its own, to a journal of its own.
    """

    def __init__(
        self,
        states_folder: Folder,
        spec: TargetSpec,
        ranks: Ranks,
        samples: Sequence[TokenizedSample],
        data: str,
        units: Sequence[Unit],
        fresh: bool,
    ) -> None:
        """``units`` are those of the first epoch; ``fresh`` deletes what is kept of some states.

        Raises: UserError for states of another target, of other samples, or kept in another order.
        """
        self.folder, self._samples, self._data = states_folder / FOLDER, samples, data
        self._shard_of = {unit: shard for shard, unit in enumerate(units)}
        order = [samples[i].sample_id for unit in units for i in unit.samples]
        bounds = accumulate((len(unit.samples) for unit in units), initial=0)
        self._manifest = StoreManifest(spec, fingerprint([data, order]), tuple(bounds))
        self.whole = self._open()
        self._writer: ShardWriter | None = None
        self._missing: set[int] = set()
        if self.whole is None:
            ranks.on_first(lambda: self._make(fresh))
            self._writer = ShardWriter(
                self.folder, self._manifest, "" if ranks.size == 1 else f"rank-{ranks.rank}"
            )
            self._missing = set(self._writer.missing())

    def will_be_whole(self, units: Iterable[Unit]) -> bool:
        """Whether nothing is missing any more when ``units`` have been kept."""
        return self._missing <= {self._shard_of[unit] for unit in units if unit in self._shard_of}

    def keep(self, unit: Unit, states: Sequence[HiddenStates], figures: Mapping[str, Any] | None) -> None:
        """Write a unit that is not there yet."""
        shard = self._shard_of.get(unit)
        if self._writer is not None and shard in self._missing:
            self._writer.write(shard, states, (), figures)
            self._missing.discard(shard)

    def read(self, sample: TokenizedSample) -> HiddenStates:
        """Return what was kept of the first epoch, which every rank has trained to its end."""
        until = time.monotonic() + _SHOWN_WITHIN_S
        while self.whole is None:
            self.whole = self._open()
            if self.whole is None and time.monotonic() > until:
                raise ContractError(
                    f"{self.folder} does not show all that the ranks have written",
                    hint="run the same command again; the last checkpoint is intact",
                )
            if self.whole is None:
                time.sleep(1.0)
        return self.whole.of(sample)

    def _make(self, fresh: bool) -> None:
        """Write the manifest, before any rank writes a shard."""
        if fresh:
            self.folder.clear()
        try:
            ShardWriter(self.folder, self._manifest)
        except ContractError:
            raise UserError(
                f"{self.folder} keeps some of the states, in the order of another training",
                hint="delete it (--fresh does), or set train.keep_states=false",
            ) from None

    def _open(self) -> KeptStates | None:
        """Return what is kept if it is all there; another training may have kept it, in another order."""
        if self.folder.size("manifest.json") is None or missing_shards(self.folder):
            return None
        store = ShardStore(self.folder)
        if store.spec.fingerprint != self._manifest.spec.fingerprint:
            raise UserError(f"{self.folder} keeps the states of another target", hint="delete it")
        return KeptStates(store, self._samples, self._data)
