"""The contract of a store: whose states it holds, of which data, and how samples lie in shards."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.errors import ContractError, UserError
from eyas.files import flush_to_disk, read_json, write_json
from eyas.types import TargetSpec

FORMAT_VERSION = 2


@dataclass(frozen=True)
class StoreManifest:
    """Written before the first shard. ``shard_bounds[i]`` is the index of shard i's first sample;
    the last entry is the number of samples. Shards are therefore units of work that can be redone
    alone, with the same bytes."""

    spec: TargetSpec
    data_fingerprint: str
    shard_bounds: tuple[int, ...]

    @property
    def num_shards(self) -> int:
        return len(self.shard_bounds) - 1

    def write(self, folder: Path) -> None:
        value = {
            "format_version": FORMAT_VERSION,
            "spec": self.spec.to_json(),
            "data_fingerprint": self.data_fingerprint,
            "shard_bounds": list(self.shard_bounds),
        }
        write_json(folder / "manifest.json", value)

    @classmethod
    def read(cls, folder: Path) -> "StoreManifest":
        """Read the manifest of the store in ``folder``.

        Raises: UserError when there is none; ContractError for a damaged one or another version.
        """
        path = folder / "manifest.json"
        if not path.is_file():
            raise UserError(f"{folder} holds no hidden states", hint="run: eyas extract -c <run file>")
        try:
            value: dict[str, Any] = read_json(path)
            version = value["format_version"]
            if version != FORMAT_VERSION:
                raise ContractError(
                    f"{folder} has store format {version}, this eyas reads {FORMAT_VERSION}",
                    hint="extract again with this version, or read it with the version that wrote it",
                )
            bounds = tuple(int(i) for i in value["shard_bounds"])
            return cls(TargetSpec.from_json(value["spec"]), str(value["data_fingerprint"]), bounds)
        except (KeyError, TypeError, ValueError) as error:
            raise ContractError(f"{path} is damaged: {error!r}", hint="extract again with --fresh") from None


def plan_shards(lengths: Sequence[int], bytes_per_token: int, shard_bytes: int) -> tuple[int, ...]:
    """Return shard bounds so that no shard of several samples exceeds ``shard_bytes``; of none, no shard."""
    bounds, size = [0], 0
    for index, length in enumerate(lengths):
        if size and size + length * bytes_per_token > shard_bytes:
            bounds.append(index)
            size = 0
        size += length * bytes_per_token
    return (*bounds, len(lengths)) if lengths else (0,)


@dataclass(frozen=True)
class ShardRecord:
    """One line of the journal: a shard that is complete on disk."""

    shard: int
    num_samples: int
    num_tokens: int
    num_bytes: int
    checksum: str
    failures: tuple[tuple[str, str], ...] = ()  # (sample id, reason)


def shard_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.safetensors"


def append_record(folder: Path, record: ShardRecord) -> None:
    """Add a line to the journal and flush it to disk."""
    path = folder / "journal.jsonl"
    with path.open("a", encoding="utf-8") as f:
        f.write(json.dumps(asdict(record)) + "\n")
    flush_to_disk(path)


def read_journal(folder: Path) -> dict[int, ShardRecord]:
    """Return the complete shards by number; a torn last line is what a crash leaves, and is cut off.

    Raises: ContractError for a damaged line before the last.
    """
    path = folder / "journal.jsonl"
    if not path.is_file():
        return {}
    lines = path.read_bytes().split(b"\n")
    torn = lines.pop()
    if torn:
        # Cut it off on disk too, or the next record would be glued to it.
        with path.open("r+b") as f:
            f.truncate(path.stat().st_size - len(torn))
    records: dict[int, ShardRecord] = {}
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            value["failures"] = tuple(tuple(f) for f in value["failures"])
            record = ShardRecord(**value)
        except (ValueError, TypeError, KeyError):
            raise ContractError(
                f"{path} line {number} is damaged", hint="extract again with --fresh"
            ) from None
        records[record.shard] = record
    return records
