"""States that a stream captured, kept for later epochs and later runs: a store in the order of training."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from eyas.errors import ContractError, UserError
from eyas.files import fingerprint
from eyas.stages.context import RunContext
from eyas.store.manifest import StoreManifest
from eyas.store.shards import ShardStore, ShardWriter, missing_shards
from eyas.types import HiddenStates, TokenizedSample

FOLDER = "train_streamed"


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


class Keeper:
    """Writes the windows of the first epoch, each a shard, and reads them once all are there."""

    def __init__(
        self,
        context: RunContext,
        samples: Sequence[TokenizedSample],
        data: str,
        windows: Sequence[Sequence[int]],
    ) -> None:
        """``windows`` are the samples of each window of the first epoch, by index."""
        self.folder, self._samples, self._data = context.states_folder / FOLDER, samples, data
        order = [samples[i].sample_id for window in windows for i in window]
        self._manifest = StoreManifest(
            context.spec, fingerprint([data, order]), tuple(accumulate(map(len, windows), initial=0))
        )
        self.whole = self._open()
        self._writer: ShardWriter | None = None
        if self.whole is None:
            if context.fresh:
                self.folder.clear()
            try:
                self._writer = ShardWriter(self.folder, self._manifest)
            except ContractError:
                raise UserError(
                    f"{self.folder} keeps some of the states, in the order of another training",
                    hint="delete it (--fresh does), or set train.keep_states=false",
                ) from None
        self._missing = set(self._writer.missing()) if self._writer else set()

    def keep(
        self,
        window: int,
        states: Sequence[HiddenStates],
        figures: Mapping[str, Any] | None,
    ) -> None:
        """Write a window that is not there yet."""
        if self._writer is None or window not in self._missing:
            return
        self._writer.write(window, states, (), figures)
        self._missing.discard(window)
        if not self._missing:
            self.whole = self._open()

    def _open(self) -> KeptStates | None:
        """Return what is kept if it is all there; another training may have kept it, in another order."""
        if self.folder.size("manifest.json") is None or missing_shards(self.folder):
            return None
        store = ShardStore(self.folder)
        if store.spec.fingerprint != self._manifest.spec.fingerprint:
            raise UserError(f"{self.folder} keeps the states of another target", hint="delete it")
        return KeptStates(store, self._samples, self._data)
