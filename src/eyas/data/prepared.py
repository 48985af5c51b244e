"""The folder of tokenized samples: parquet files and a manifest that says what they are."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eyas.data.sources import Drop
from eyas.data.vocab import COVERAGE_SIZES, count_supervised, coverage_at
from eyas.errors import ContractError, UserError
from eyas.files import flush_to_disk, read_json, refusing_damaged, seal, sha256_of_file, unseal, write_json
from eyas.types import Conversation, Message, TokenizedSample

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, Split] = ("train", "held_out")
FORMAT_VERSION = 2

_SAMPLES = pa.schema(
    [
        ("sample_id", pa.string()),
        ("split", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("cut", pa.bool_()),
    ]
)
_CONVERSATIONS = pa.schema([("conversation_id", pa.string()), ("split", pa.string()), ("row", pa.string())])
_HASHED = ("samples.parquet", "conversations.parquet")
_REDO = "run the command that wrote it again: eyas prepare, or eyas regenerate, which keeps its answers"
_ROWS_PER_GROUP = 1000
_TOKENS_PER_GROUP = 2_000_000


@dataclass
class PreparedWriter:
    """Streams conversations, samples and drops into a folder; ``finish`` makes it believable."""

    folder: Path
    vocab_size: int
    counts: Counter[str] = field(default_factory=Counter)
    drops: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._digest = hashlib.sha256()
        self._samples = pq.ParquetWriter(self.folder / "samples.parquet", _SAMPLES)
        self._conversations = pq.ParquetWriter(self.folder / "conversations.parquet", _CONVERSATIONS)
        self._drops = (self.folder / "drops.jsonl").open("w", encoding="utf-8")
        self._sample_rows: list[tuple[Split, TokenizedSample]] = []
        self._conversation_rows: list[dict[str, str]] = []
        self._num_waiting = 0
        self._vocab_counts = np.zeros(self.vocab_size, dtype=np.int64)

    def add_sample(self, split: Split, sample: TokenizedSample) -> None:
        self._digest.update(f"{sample.sample_id}\0{split}\0{sample.cut}\0".encode())
        self._digest.update(sample.input_ids.tobytes() + sample.loss_mask.tobytes())
        self.counts[f"{split}_samples"] += 1
        self.counts[f"{split}_tokens"] += len(sample)
        self.counts[f"{split}_supervised_tokens"] += int(sample.loss_mask.sum())
        self._sample_rows.append((split, sample))
        self._waiting(len(sample))

    def add_conversation(self, split: Split, conversation: Conversation) -> None:
        row = {
            "messages": [m.to_json() for m in conversation.messages],
            "source": conversation.source,
            "tools": list(conversation.tools),
        }
        text = json.dumps(row, ensure_ascii=False)
        self._digest.update(f"{conversation.conversation_id}\0{split}\0{text}\0".encode())
        self._conversation_rows.append(
            {"conversation_id": conversation.conversation_id, "split": split, "row": text}
        )
        self._waiting(len(text) // 4)

    def drop(self, drop: Drop) -> None:
        self.drops[drop.reason] += 1
        self._drops.write(json.dumps(drop.__dict__) + "\n")

    def finish(self, **facts: Any) -> dict[str, Any]:
        """Close the files and write the manifest with ``facts`` beside the counts."""
        self.close()
        for name in (*_HASHED, "drops.jsonl"):
            flush_to_disk(self.folder / name)
        manifest = {
            "format_version": FORMAT_VERSION,
            "sha256": {name: sha256_of_file(self.folder / name) for name in _HASHED},
            "fingerprint": self._digest.hexdigest()[:16],
            "counts": dict(sorted(self.counts.items())),
            "drops": dict(self.drops.most_common()),
            "coverage": coverage_at(self._vocab_counts, COVERAGE_SIZES),
            **facts,
        }
        write_json(self.folder / "manifest.json", seal(manifest))
        return manifest

    def __enter__(self) -> "PreparedWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is waiting and close the files."""
        self._flush()
        self._samples.close()
        self._conversations.close()
        self._drops.close()

    def _waiting(self, num_tokens: int) -> None:
        self._num_waiting += num_tokens
        rows = max(len(self._sample_rows), len(self._conversation_rows))
        if rows >= _ROWS_PER_GROUP or self._num_waiting >= _TOKENS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._sample_rows:
            samples = [sample for _, sample in self._sample_rows]
            offsets = np.cumsum([0, *(len(s) for s in samples)], dtype=np.int32)
            columns = [
                pa.array([s.sample_id for s in samples], pa.string()),
                pa.array([split for split, _ in self._sample_rows], pa.string()),
                pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([s.input_ids for s in samples]))),
                pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([s.loss_mask for s in samples]))),
                pa.array([s.cut for s in samples], pa.bool_()),
            ]
            self._samples.write_table(pa.Table.from_arrays(columns, schema=_SAMPLES))
            trained = [sample for split, sample in self._sample_rows if split == "train"]
            self._vocab_counts += count_supervised(trained, self.vocab_size)
        if self._conversation_rows:
            table = pa.Table.from_pylist(self._conversation_rows, schema=_CONVERSATIONS)
            self._conversations.write_table(table)
        self._sample_rows, self._conversation_rows, self._num_waiting = [], [], 0


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a prepared folder's manifest.

    Raises: UserError when there is none; ContractError for a damaged one or another format version.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no prepared data", hint="run: eyas prepare -c <run file>")
    with refusing_damaged(path, _REDO):
        return unseal(read_json(path), FORMAT_VERSION)


def is_whole(folder: Path) -> bool:
    """Whether a prepared folder's files are there, byte for byte as they were written."""
    try:
        for name in _HASHED:
            _verified(folder, name)
    except (ContractError, UserError):
        return False
    return True


def _verified(folder: Path, name: str) -> Path:
    """Return the path of a file of which no byte has changed.

    Raises: ContractError naming the file.
    """
    path = folder / name
    digest = read_manifest(folder)["sha256"][name]
    if not path.is_file():
        raise ContractError(f"{path} is missing", hint=_REDO)
    if _digest_of(path, path.stat().st_mtime_ns) != digest:
        raise ContractError(f"{path} is damaged: its checksum is not the one written", hint=_REDO)
    return path


@lru_cache(maxsize=16)
def _digest_of(path: Path, mtime_ns: int) -> str:
    return sha256_of_file(path)


def read_samples(folder: Path, split: Split) -> Iterator[TokenizedSample]:
    """Yield the samples of one split in their stored order."""
    for batch in pq.ParquetFile(_verified(folder, "samples.parquet")).iter_batches(_ROWS_PER_GROUP):
        ids, mask = batch.column("input_ids"), batch.column("loss_mask")
        bounds = ids.offsets.to_numpy()
        all_ids = ids.values.to_numpy()
        all_mask = mask.values.to_numpy(zero_copy_only=False)
        mask_bounds = mask.offsets.to_numpy()
        names = (batch.column(name).to_pylist() for name in ("sample_id", "split", "cut"))
        for i, (sample_id, row_split, cut) in enumerate(zip(*names, strict=True)):
            if row_split == split:
                yield TokenizedSample(
                    sample_id,
                    all_ids[bounds[i] : bounds[i + 1]].astype(np.int32),
                    all_mask[mask_bounds[i] : mask_bounds[i + 1]].astype(bool),
                    cut,
                )


def read_conversations(folder: Path) -> Iterator[tuple[Split, Conversation]]:
    """Yield (split, conversation) in stored order."""
    for batch in pq.ParquetFile(_verified(folder, "conversations.parquet")).iter_batches(_ROWS_PER_GROUP):
        for row in batch.to_pylist():
            value = json.loads(row["row"])
            messages = tuple(
                Message(**{**m, "tool_calls": tuple(m["tool_calls"])}) for m in value["messages"]
            )
            yield (
                row["split"],
                Conversation(row["conversation_id"], messages, value["source"], tuple(value["tools"])),
            )
