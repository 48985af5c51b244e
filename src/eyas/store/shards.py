"""Shards on disk: one safetensors file each, complete or absent, verified before they are believed."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from eyas.errors import ContractError
from eyas.files import fingerprint
from eyas.safetensors_io import checksum_of_file, write_tensors
from eyas.store import fp8
from eyas.store.journal import ShardRecord, append_record, last_attempts, read_journal, repair_journal
from eyas.store.manifest import FORMAT_VERSION, StoreManifest, shard_name
from eyas.store.shard_reader import OpenShard
from eyas.store.storage import Folder, folder_of
from eyas.types import Failure, HiddenStates, TargetSpec, TokenizedSample

_OPEN_SHARDS = 64


class ShardWriter:
    """Writes shards of one store; the manifest is there first and says what belongs where.

    Several processes may write one store, each with a name of its own as ``writer`` and shards of its
    own; a writer without a name is the only one.
    """

    def __init__(self, where: "Path | str | Folder", manifest: StoreManifest, writer: str = "") -> None:
        self.folder = folder_of(where)
        self.manifest = manifest
        self.writer = writer
        if self.folder.size("manifest.json") is None:
            manifest.write(self.folder)
        if StoreManifest.read(self.folder) != manifest:
            raise ContractError(
                f"{self.folder} holds states of another target or other data",
                hint="extract again with --fresh",
            )
        self._attempts = last_attempts(self.folder)
        repair_journal(self.folder, writer)
        self._journal = threading.Lock()  # shards may be written by several threads

    def missing(self) -> list[int]:
        """Return the numbers of the shards that are not yet complete."""
        return missing_shards(self.folder)

    def write(
        self,
        shard: int,
        states: Sequence[HiddenStates],
        failures: Sequence[Failure] = (),
        figures: Mapping[str, Any] | None = None,
    ) -> ShardRecord:
        """Write one shard and journal it. Its bytes depend only on its content."""
        with self.folder.put(shard_name(shard)) as beside, beside.open("wb") as f:
            num_bytes, checksum = write_tensors(
                f, _tensors(states, self.manifest), _header(states, self.manifest)
            )
        with self._journal:
            attempt = self._attempts[shard] = self._attempts.get(shard, 0) + 1
            record = ShardRecord(
                shard,
                len(states),
                sum(len(s.sample) for s in states),
                num_bytes,
                checksum,
                tuple((f.sample_id, f.reason) for f in failures),
                figures,
                attempt,
            )
            append_record(self.folder, record, self.writer)
        return record


def missing_shards(where: "Path | str | Folder") -> list[int]:
    """Return the numbers of the shards of the store at ``where`` that are not complete."""
    folder = folder_of(where)
    records = read_journal(folder, strict=False)
    return [
        shard
        for shard in range(StoreManifest.read(folder).num_shards)
        if shard not in records or folder.size(shard_name(shard)) != records[shard].num_bytes
    ]


def _header(states: Sequence[HiddenStates], manifest: StoreManifest) -> dict[str, str]:
    facts = {
        "format_version": FORMAT_VERSION,
        "target": manifest.spec.fingerprint,
        "sample_ids": [s.sample.sample_id for s in states],
    }
    # One entry: safetensors writes several in a random order, and a redone shard must have the same bytes.
    return {"eyas": json.dumps(facts)}


def check_shape(states: HiddenStates, spec: TargetSpec) -> None:
    """Raises: ContractError unless the states have the target's layers and width."""
    _, num_layers, width = states.aux.shape
    if (num_layers, width) != (spec.num_aux_layers, spec.hidden_size):
        raise ContractError(
            f"sample {states.sample.sample_id}: {num_layers} aux layers of width {width}, "
            f"the target's are {spec.num_aux_layers} of width {spec.hidden_size}",
            hint="the engine returned only some of the layers, or of their width, that it was asked for",
        )


def _tensors(states: Sequence[HiddenStates], manifest: StoreManifest) -> dict[str, list[torch.Tensor]]:
    spec = manifest.spec
    for s in states:
        check_shape(s, spec)
    dtype = getattr(torch, spec.dtype)
    samples = [s.sample for s in states]
    bounds = np.cumsum([0, *(len(s) for s in samples)], dtype=np.int64)
    aux = [torch.empty(0, spec.num_aux_layers, spec.hidden_size, dtype=dtype), *(s.aux for s in states)]
    last = [torch.empty(0, spec.hidden_size, dtype=dtype), *(s.last for s in states)]
    return {
        "offsets": [torch.from_numpy(bounds)],  # (n + 1,)
        "input_ids": [
            torch.empty(0, dtype=torch.int32),
            *(torch.from_numpy(s.input_ids) for s in samples),
        ],  # (N,)
        **_stored("aux", aux, dtype, manifest),  # (N, A, D)
        **_stored("last", last, dtype, manifest),  # (R, D)
        "loss_mask": [
            torch.empty(0, dtype=torch.bool),
            *(torch.from_numpy(s.loss_mask) for s in samples),
        ],  # (N,)
        "cut": [torch.tensor([s.cut for s in samples], dtype=torch.bool)],  # (n,)
    }


def _stored(
    name: str, parts: list[torch.Tensor], dtype: torch.dtype, manifest: StoreManifest
) -> dict[str, list[torch.Tensor]]:
    parts = [part.to(dtype) for part in parts]
    if manifest.states_dtype == "auto":
        return {name: parts}
    values, scales = zip(*(fp8.encode(part) for part in parts), strict=True)
    return {f"{name}_scale": list(scales), name: list(values)}


class ShardStore:
    """A StateReader over a finished store. A shard's checksum is verified before its first states are read.

    Lengths and tokens come from the headers at once: hashing a large store takes minutes, and is done by
    the threads that read ahead while training runs.
    Raises: ContractError when shards are missing or damaged, naming them.
    """

    def __init__(self, where: "Path | str | Folder") -> None:
        self.folder = folder_of(where)
        self.manifest = StoreManifest.read(self.folder)
        records = read_journal(self.folder)
        missing = [s for s in range(self.manifest.num_shards) if s not in records]
        if missing:
            raise ContractError(
                f"{self.folder} is incomplete: {len(missing)} of {self.manifest.num_shards} "
                "shards are missing",
                hint="run the same eyas extract again; it does what is missing",
            )
        self.spec = self.manifest.spec
        self.records = {s: records[s] for s in range(self.manifest.num_shards)}
        self.fingerprint = fingerprint(
            [
                self.manifest.data_fingerprint,
                self.spec.fingerprint,
                [r.checksum for r in self.records.values()],
            ]
        )
        # Threads that read ahead meet at the same shards; one of them verifies, the others wait for it.
        self._verifying = {shard: threading.Lock() for shard in self.records}
        self._verified: set[int] = set()
        self._open = lru_cache(maxsize=_OPEN_SHARDS)(self._open_shard)
        self._positions = [(shard, i) for shard, r in self.records.items() for i in range(r.num_samples)]
        self._lengths: list[int] | None = None

    @property
    def lengths(self) -> Sequence[int]:
        if self._lengths is None:
            self._lengths = [n for shard in self.records for n in self._open(shard).lengths()]
        return self._lengths

    def read(self, index: int) -> HiddenStates:
        shard, position = self._positions[index]
        if shard not in self._verified:
            with self._verifying[shard]:
                self._verify(shard)
        return self._open(shard).read(position)

    def sample(self, index: int) -> TokenizedSample:
        """Return the tokens of a sample without its states; its shard may not be verified yet."""
        shard, position = self._positions[index]
        return self._open(shard).samples[position]

    def shard(self, shard: int) -> Iterator[HiddenStates]:
        """Yield the states of one shard, verified."""
        opened = self._open_shard(shard)
        self._verify(shard)
        return (opened.read(position) for position in range(len(opened.samples)))

    def verify(self, shard: int) -> int:
        """Read a shard whole and return its bytes.

        Raises: ContractError naming the file and what is wrong with it.
        """
        self._verified.discard(shard)
        self._open_shard(shard)
        self._verify(shard)
        return self.records[shard].num_bytes

    def _verify(self, shard: int) -> None:
        if shard in self._verified:
            return
        name = shard_name(shard)
        if checksum_of_file(self.folder.local(name)) != self.records[shard].checksum:
            self.folder.forget(name)
            raise ContractError(
                f"{self.folder}/{name} is damaged: its checksum is not the one written", hint=_redo(name)
            )
        self._verified.add(shard)

    def _open_shard(self, shard: int) -> OpenShard:
        name, record = shard_name(shard), self.records[shard]
        path, redo = f"{self.folder}/{name}", _redo(name)
        size = self.folder.size(name)
        if size != record.num_bytes:
            found = "no file" if size is None else size
            raise ContractError(
                f"{path} is damaged: {found} bytes, {record.num_bytes} were written", hint=redo
            )
        local, trouble = self.folder.local(name), None
        try:
            opened = OpenShard(local, getattr(torch, self.spec.dtype))
        except (SafetensorError, KeyError, ValueError, TypeError, IndexError, ContractError) as error:
            trouble = f"is damaged: {error}"
        else:
            if opened.target != self.spec.fingerprint:
                trouble = "holds states of another target"
            elif len(opened.samples) != record.num_samples:
                trouble = f"holds {len(opened.samples)} samples, {record.num_samples} were written"
        if trouble:
            self.folder.forget(name)
            raise ContractError(f"{path} {trouble}", hint=redo)
        return opened


def _redo(name: str) -> str:
    return f"delete {name} and run the same eyas extract again; it redoes exactly this shard"
