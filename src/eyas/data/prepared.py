"""The folder of tokenized samples: parquet files and a manifest that says what they are."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eyas.data.sources import Drop
from eyas.errors import ContractError, UserError
from eyas.files import read_json, write_json
from eyas.types import Conversation, Message, TokenizedSample

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, Split] = ("train", "held_out")
FORMAT_VERSION = 1

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
_ROWS_PER_GROUP = 1000


@dataclass
class PreparedWriter:
    """Streams conversations, samples and drops into a folder; ``finish`` makes it believable."""

    folder: Path
    counts: Counter[str] = field(default_factory=Counter)
    drops: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._digest = hashlib.sha256()
        self._samples = pq.ParquetWriter(self.folder / "samples.parquet", _SAMPLES)
        self._conversations = pq.ParquetWriter(self.folder / "conversations.parquet", _CONVERSATIONS)
        self._drops = (self.folder / "drops.jsonl").open("w", encoding="utf-8")
        self._sample_rows: list[dict[str, Any]] = []
        self._conversation_rows: list[dict[str, Any]] = []

    def add_sample(self, split: Split, sample: TokenizedSample) -> None:
        row = {
            "sample_id": sample.sample_id,
            "split": split,
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask,
            "cut": sample.cut,
        }
        self._digest.update(f"{sample.sample_id}\0{split}\0{sample.cut}\0".encode())
        self._digest.update(sample.input_ids.tobytes() + sample.loss_mask.tobytes())
        self.counts[f"{split}_samples"] += 1
        self.counts[f"{split}_tokens"] += len(sample)
        self.counts[f"{split}_supervised_tokens"] += int(sample.loss_mask.sum())
        self._sample_rows.append(row)
        if len(self._sample_rows) >= _ROWS_PER_GROUP:
            self._flush()

    def add_conversation(self, split: Split, conversation: Conversation) -> None:
        row = {
            "messages": conversation.for_template(),
            "source": conversation.source,
            "tools": [dict(tool) for tool in conversation.tools],
        }
        text = json.dumps(row, ensure_ascii=False)
        self._digest.update(f"{conversation.conversation_id}\0{split}\0{text}\0".encode())
        self.counts[f"{split}_conversations"] += 1
        self._conversation_rows.append(
            {"conversation_id": conversation.conversation_id, "split": split, "row": text}
        )
        if len(self._conversation_rows) >= _ROWS_PER_GROUP:
            self._flush()

    def drop(self, drop: Drop) -> None:
        self.drops[drop.reason] += 1
        self._drops.write(json.dumps(drop.__dict__, ensure_ascii=False) + "\n")

    def finish(self, **facts: Any) -> dict[str, Any]:
        """Close the files and write the manifest with ``facts`` beside the counts."""
        self._flush()
        self.close()
        manifest = {
            "format_version": FORMAT_VERSION,
            "fingerprint": self._digest.hexdigest()[:16],
            "counts": dict(sorted(self.counts.items())),
            "drops": dict(self.drops.most_common()),
            **facts,
        }
        write_json(self.folder / "manifest.json", manifest)
        return manifest

    def close(self) -> None:
        self._samples.close()
        self._conversations.close()
        self._drops.close()

    def _flush(self) -> None:
        if self._sample_rows:
            self._samples.write_table(pa.Table.from_pylist(self._sample_rows, schema=_SAMPLES))
        if self._conversation_rows:
            table = pa.Table.from_pylist(self._conversation_rows, schema=_CONVERSATIONS)
            self._conversations.write_table(table)
        self._sample_rows, self._conversation_rows = [], []


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a prepared folder's manifest.

    Raises: UserError when there is none; ContractError for another format version.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no prepared data", hint="run: eyas prepare -c <run file>")
    manifest: dict[str, Any] = read_json(path)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ContractError(
            f"{folder} has format version {manifest.get('format_version')}, this eyas reads {FORMAT_VERSION}",
            hint="prepare the data again with this version",
        )
    return manifest


def read_samples(folder: Path, split: Split) -> Iterator[TokenizedSample]:
    """Yield the samples of one split in their stored order."""
    for batch in pq.ParquetFile(folder / "samples.parquet").iter_batches(_ROWS_PER_GROUP):
        columns = [batch.column(name) for name in ("sample_id", "split", "input_ids", "loss_mask", "cut")]
        for sample_id, row_split, ids, mask, cut in zip(*columns, strict=True):
            if row_split.as_py() == split:
                yield TokenizedSample(
                    sample_id.as_py(),
                    ids.values.to_numpy().astype(np.int32),
                    np.asarray(mask.values.to_numpy(zero_copy_only=False), dtype=bool),
                    cut.as_py(),
                )


def read_conversations(folder: Path) -> Iterator[tuple[Split, Conversation]]:
    """Yield (split, conversation) in stored order."""
    for batch in pq.ParquetFile(folder / "conversations.parquet").iter_batches(_ROWS_PER_GROUP):
        for row in batch.to_pylist():
            value = json.loads(row["row"])
            messages = tuple(
                Message(m["role"], m["content"], m.get("reasoning_content"), tuple(m.get("tool_calls") or ()))
                for m in value["messages"]
            )
            yield (
                row["split"],
                Conversation(row["conversation_id"], messages, value["source"], tuple(value["tools"])),
            )
