"""The journal of a store: one line for each shard that is complete, with its length and checksum.

A store may have several writers, each with a journal file of its own: ``journal.jsonl``, or
``journal-NAME.jsonl`` for a writer with a name. Readers merge them all. Lines are only ever added.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.errors import ContractError
from eyas.files import seal, unseal
from eyas.store.storage import Folder, folder_of


@dataclass(frozen=True)
class ShardRecord:
    """One line: a shard that is complete on disk. ``figures`` are what its states look like, by layer.

    ``attempt`` counts the times a shard was written; of several records the highest counts.
    """

    shard: int
    num_samples: int
    num_tokens: int
    num_bytes: int
    checksum: str
    failures: tuple[tuple[str, str], ...] = ()  # (sample id, reason)
    figures: Mapping[str, Any] | None = None
    attempt: int = 1

    def to_line(self) -> bytes:
        return json.dumps(seal(asdict(self)), ensure_ascii=False).encode()

    @classmethod
    def from_line(cls, line: bytes) -> "ShardRecord":
        """Raises: ValueError for a line that is not what was written."""
        try:
            value = unseal(json.loads(line))
            value["failures"] = tuple((str(i), str(r)) for i, r in value["failures"])
            record = cls(**value)
            for name in ("shard", "num_samples", "num_tokens", "num_bytes", "attempt"):
                if type(getattr(record, name)) is not int:
                    raise ValueError(f"{name} is no whole number")
            return record
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"not a record: {error}") from None


def journal_name(writer: str) -> str:
    return f"journal-{writer}.jsonl" if writer else "journal.jsonl"


def append_record(where: "Path | str | Folder", record: ShardRecord, writer: str = "") -> None:
    """Add a line to a writer's journal and flush it to disk."""
    folder_of(where).append_line(journal_name(writer), record.shard, record.to_line())


def read_journal(where: "Path | str | Folder", strict: bool = True) -> dict[int, ShardRecord]:
    """Return the complete shards by number; a torn last line is what a crash leaves, and does not count.

    Raises: ContractError when ``strict`` and a line before the last is damaged, or two writers have
    written one shard at the same time; otherwise such a shard counts as missing.
    """
    folder = folder_of(where)
    records: dict[int, ShardRecord] = {}
    rivals: set[int] = set()
    for name, number, line in _lines(folder):
        try:
            record = ShardRecord.from_line(line)
        except ValueError as error:
            if strict:
                raise ContractError(
                    f"{folder}/{name} line {number} is damaged: {error}",
                    hint="run the same eyas extract again; it redoes exactly the shard of this line",
                ) from None
            continue
        known = records.get(record.shard)
        if known is None or record.attempt > known.attempt:
            records[record.shard] = record
            rivals.discard(record.shard)
        elif record.attempt == known.attempt and record.checksum != known.checksum:
            rivals.add(record.shard)
    if rivals and strict:
        raise ContractError(
            f"{folder}: two writers have written shard {min(rivals)} with different states",
            hint="run the same eyas extract again; it redoes exactly this shard",
        )
    return {shard: record for shard, record in records.items() if shard not in rivals}


def last_attempts(where: "Path | str | Folder") -> dict[int, int]:
    """Return how often each shard has been written, damaged lines aside."""
    attempts: dict[int, int] = {}
    for _, _, line in _lines(folder_of(where)):
        try:
            record = ShardRecord.from_line(line)
        except ValueError:
            continue
        attempts[record.shard] = max(record.attempt, attempts.get(record.shard, 0))
    return attempts


def repair_journal(where: "Path | str | Folder", writer: str = "") -> None:
    """Cut torn and damaged lines out of a writer's own journal, or out of all when there is one writer.

    A line added behind a torn one would be glued to it.
    """
    folder = folder_of(where)
    for name in [journal_name(writer)] if writer else folder.names("journal*.jsonl"):
        content = folder.read(name) if folder.size(name) is not None else b""
        kept = b"".join(line + b"\n" for line in content.split(b"\n") if _is_record(line))
        if kept != content:
            folder.write(name, kept)


def _is_record(line: bytes) -> bool:
    try:
        ShardRecord.from_line(line)
    except ValueError:
        return False
    return True


def _lines(folder: Folder) -> Iterator[tuple[str, int, bytes]]:
    """Yield (file, line number, line) of all that was written whole."""
    for name in folder.names("journal*.jsonl"):
        *lines, _torn = folder.read(name).split(b"\n")
        for number, line in enumerate(lines, start=1):
            yield name, number, line
