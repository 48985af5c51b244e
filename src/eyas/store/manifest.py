"""The contract of a store: whose states it holds, of which data, and how samples lie in shards."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import UserError
from eyas.files import refusing_damaged, seal, unseal
from eyas.store.storage import Folder, folder_of
from eyas.types import TargetSpec

FORMAT_VERSION = 2


@dataclass(frozen=True)
class StoreManifest:
    """Written before the first shard. ``shard_bounds[i]`` is the index of shard i's first sample;
    the last entry is the number of samples. Shards are therefore units of work that can be redone
    alone, with the same bytes. ``states_dtype`` is how the states lie on disk: ``auto`` is as the target
    computed them."""

    spec: TargetSpec
    data_fingerprint: str
    shard_bounds: tuple[int, ...]
    states_dtype: str = "auto"

    @property
    def num_shards(self) -> int:
        return len(self.shard_bounds) - 1

    def write(self, where: "Path | str | Folder") -> None:
        value = {
            "format_version": FORMAT_VERSION,
            "spec": self.spec.to_json(),
            "data_fingerprint": self.data_fingerprint,
            "shard_bounds": list(self.shard_bounds),
            "states_dtype": self.states_dtype,
        }
        text = json.dumps(seal(value), indent=2, ensure_ascii=False) + "\n"
        folder_of(where).write("manifest.json", text.encode())

    @classmethod
    def read(cls, where: "Path | str | Folder") -> "StoreManifest":
        """Read the manifest of the store at ``where``.

        Raises: UserError when there is none; ContractError for a damaged one or another version.
        """
        folder = folder_of(where)
        if folder.size("manifest.json") is None:
            raise UserError(f"{folder} holds no hidden states", hint="run: eyas extract -c <run file>")
        redo = "delete it and run the same eyas extract again; whole shards are kept"
        with refusing_damaged(f"{folder}/manifest.json", redo):
            value = unseal(json.loads(folder.read("manifest.json")), FORMAT_VERSION)
            bounds = tuple(int(i) for i in value["shard_bounds"])
            if not bounds or bounds[0] != 0 or list(bounds) != sorted(bounds):
                raise ValueError("its shards do not follow each other")
            spec = TargetSpec.from_json(value["spec"])
            return cls(spec, str(value["data_fingerprint"]), bounds, str(value["states_dtype"]))


def stored_bytes_per_token(spec: TargetSpec, states_dtype: str) -> int:
    """Return the bytes that the states of one fully supervised token take on disk."""
    if states_dtype == "auto":
        return spec.bytes_per_token
    return (spec.num_aux_layers + 1) * (spec.hidden_size + 4)  # float8 with fp32 scales


def plan_shards(lengths: Sequence[int], bytes_per_token: int, shard_bytes: int) -> tuple[int, ...]:
    """Return shard bounds so that no shard of several samples exceeds ``shard_bytes``; of none, no shard.

    Of several shards the last ones get smaller, each a quarter of what is left: what is still to be written
    after the engine's last state takes moments, and writers and the machines of a fleet end together.
    """
    left = sum(lengths) * bytes_per_token
    smallest = shard_bytes // 16 if left > shard_bytes else shard_bytes
    bounds, size, limit = [0], 0, min(shard_bytes, max(left // 4, smallest))
    for index, length in enumerate(lengths):
        if size and size + length * bytes_per_token > limit:
            bounds.append(index)
            size, limit = 0, min(shard_bytes, max(left // 4, smallest))
        size += length * bytes_per_token
        left -= length * bytes_per_token
    return (*bounds, len(lengths)) if lengths else (0,)


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"
