"""Shards on disk: one safetensors file each, complete or absent, verified before they are believed."""

import json
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from eyas.errors import ContractError
from eyas.files import atomic_file, fingerprint
from eyas.store.manifest import (
    FORMAT_VERSION,
    ShardRecord,
    StoreManifest,
    append_record,
    read_journal,
    shard_path,
)
from eyas.tensorfile import checksum_of_file, write_tensors
from eyas.types import Failure, HiddenStates, TokenizedSample


class ShardWriter:
    """Writes the shards of one store; the manifest is there first and says what belongs where."""

    def __init__(self, folder: Path, manifest: StoreManifest) -> None:
        self.folder = folder
        self.manifest = manifest
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "manifest.json").is_file():
            manifest.write(folder)
        written = StoreManifest.read(folder)
        if written != manifest:
            raise ContractError(
                f"{folder} holds states of another target or other data", hint="extract again with --fresh"
            )
        self._journal = threading.Lock()  # shards may be written by several threads

    def missing(self) -> list[int]:
        """Return the numbers of the shards that are not yet complete."""
        return missing_shards(self.folder)

    def write(
        self, shard: int, states: Sequence[HiddenStates], failures: Sequence[Failure] = ()
    ) -> ShardRecord:
        """Write one shard and journal it. Its bytes depend only on its content."""
        path = shard_path(self.folder, shard)
        with atomic_file(path) as beside, beside.open("wb") as f:
            num_bytes, checksum = write_tensors(
                f, _tensors(states, self.manifest), _header(states, self.manifest)
            )
        record = ShardRecord(
            shard,
            len(states),
            sum(len(s.sample) for s in states),
            num_bytes,
            checksum,
            tuple((f.sample_id, f.reason) for f in failures),
        )
        with self._journal:
            append_record(self.folder, record)
        return record


def missing_shards(folder: Path) -> list[int]:
    """Return the numbers of the shards of the store in ``folder`` that are not complete on disk."""
    records = read_journal(folder)
    return [
        shard
        for shard in range(StoreManifest.read(folder).num_shards)
        if shard not in records or not _is_whole(shard_path(folder, shard), records[shard].num_bytes)
    ]


def _is_whole(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _header(states: Sequence[HiddenStates], manifest: StoreManifest) -> dict[str, str]:
    facts = {
        "format_version": FORMAT_VERSION,
        "target": manifest.spec.fingerprint,
        "sample_ids": [s.sample.sample_id for s in states],
    }
    # One entry: safetensors writes several in a random order, and a redone shard must have the same bytes.
    return {"eyas": json.dumps(facts)}


def _tensors(states: Sequence[HiddenStates], manifest: StoreManifest) -> dict[str, list[torch.Tensor]]:
    spec = manifest.spec
    for s in states:
        if s.aux.shape[1:] != (spec.num_aux_layers, spec.hidden_size):
            raise ContractError(
                f"sample {s.sample.sample_id}: {s.aux.shape[1]} aux layers of width {s.aux.shape[2]}, "
                f"the target's are {spec.num_aux_layers} of width {spec.hidden_size}",
                hint="the engine returned only some of the layers that it was asked for",
            )
    dtype = getattr(torch, spec.dtype)
    samples = [s.sample for s in states]
    bounds = np.cumsum([0, *(len(s) for s in samples)], dtype=np.int64)
    return {
        "offsets": [torch.from_numpy(bounds)],  # (n + 1,)
        "input_ids": [
            torch.empty(0, dtype=torch.int32),
            *(torch.from_numpy(s.input_ids) for s in samples),
        ],  # (N,)
        "aux": [
            torch.empty(0, spec.num_aux_layers, spec.hidden_size, dtype=dtype),
            *(s.aux.to(dtype) for s in states),
        ],  # (N, A, D)
        "last": [
            torch.empty(0, spec.hidden_size, dtype=dtype),
            *(s.last.to(dtype) for s in states),
        ],  # (R, D)
        "loss_mask": [
            torch.empty(0, dtype=torch.bool),
            *(torch.from_numpy(s.loss_mask) for s in samples),
        ],  # (N,)
        "cut": [torch.tensor([s.cut for s in samples], dtype=torch.bool)],  # (n,)
    }


class ShardStore:
    """A StateReader over a finished store. A shard's checksum is verified before its first states are read.

    Lengths and tokens come from the headers at once: hashing a large store takes minutes, and is done by
    the threads that read ahead while training runs.
    Raises: ContractError when shards are missing or damaged, naming them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = StoreManifest.read(folder)
        records = read_journal(folder)
        missing = [s for s in range(manifest.num_shards) if s not in records]
        if missing:
            raise ContractError(
                f"{folder} is incomplete: {len(missing)} of {manifest.num_shards} shards are missing",
                hint="run the same eyas extract again; it does what is missing",
            )
        self.spec = manifest.spec
        self.fingerprint = fingerprint(
            [manifest.data_fingerprint, self.spec.fingerprint, [records[s].checksum for s in sorted(records)]]
        )
        self._records = records
        self._open = lru_cache(maxsize=64)(self._open_shard)
        # Threads that read ahead meet at the same shards; one of them verifies, the others wait for it.
        self._verifying = {shard: threading.Lock() for shard in records}
        self._verified: set[int] = set()
        self._places = [(shard, i) for shard in sorted(records) for i in range(records[shard].num_samples)]
        self._lengths: list[int] | None = None

    @property
    def lengths(self) -> Sequence[int]:
        if self._lengths is None:
            self._lengths = [n for shard in sorted(self._records) for n in self._open(shard).lengths()]
        return self._lengths

    def read(self, index: int) -> HiddenStates:
        shard, place = self._places[index]
        if shard not in self._verified:
            with self._verifying[shard]:
                self._verify(shard)
        return self._open(shard).read(place)

    def sample(self, index: int) -> TokenizedSample:
        """Return the tokens of a sample without its states; its shard may not be verified yet."""
        shard, place = self._places[index]
        return self._open(shard).samples[place]

    def _verify(self, shard: int) -> None:
        if shard in self._verified:
            return
        path = shard_path(self.folder, shard)
        if checksum_of_file(path) != self._records[shard].checksum:
            raise ContractError(f"{path} is damaged: its checksum is not the one written", hint=_redo(path))
        self._verified.add(shard)

    def _open_shard(self, shard: int) -> "_OpenShard":
        path = shard_path(self.folder, shard)
        record, redo = self._records[shard], _redo(path)
        if not _is_whole(path, record.num_bytes):
            size = path.stat().st_size if path.is_file() else "no file"
            raise ContractError(
                f"{path} is damaged: {size} bytes, {record.num_bytes} were written", hint=redo
            )
        try:
            opened = _OpenShard(path)
        except (SafetensorError, KeyError, ValueError, ContractError) as error:
            raise ContractError(f"{path} is damaged: {error}", hint=redo) from None
        if opened.target != self.spec.fingerprint:
            raise ContractError(f"{path} holds states of another target", hint=redo)
        return opened


def _redo(path: Path) -> str:
    return f"delete {path.name} and run the same eyas extract again; it redoes exactly this shard"


class _OpenShard:
    """One memory-mapped shard."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        facts = json.loads(self._file.metadata()["eyas"])
        self.target = facts["target"]
        self.sample_ids: list[str] = facts["sample_ids"]
        self._input_ids = self._file.get_tensor("input_ids").numpy()
        self._loss_mask = self._file.get_tensor("loss_mask").numpy()
        self._cut = self._file.get_tensor("cut").tolist()
        self._offsets = self._file.get_tensor("offsets").tolist()
        self._aux = self._file.get_slice("aux")
        self._last = self._file.get_slice("last")
        self.samples = [self._sample(i) for i in range(len(self.sample_ids))]
        self._rows = np.cumsum([0, *(int(s.supervised.sum()) for s in self.samples)]).tolist()

    def lengths(self) -> list[int]:
        return [len(s) for s in self.samples]

    def read(self, place: int) -> HiddenStates:
        start, end = self._offsets[place], self._offsets[place + 1]
        first, stop = self._rows[place], self._rows[place + 1]
        return HiddenStates(self.samples[place], self._aux[start:end], self._last[first:stop])

    def _sample(self, place: int) -> TokenizedSample:
        start, end = self._offsets[place], self._offsets[place + 1]
        return TokenizedSample(
            self.sample_ids[place],
            self._input_ids[start:end],
            self._loss_mask[start:end],
            self._cut[place],
        )
