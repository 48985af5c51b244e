"""Files that are complete or absent, and fingerprints of what they hold."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def fingerprint(value: Any) -> str:
    """Return 16 hex digits that identify a JSON-like value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def flush_to_disk(path: Path) -> None:
    """Force a file's or a folder's entry to stable storage."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path``; on success it is flushed and renamed, on failure removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield beside
        flush_to_disk(beside)
        beside.replace(path)
        flush_to_disk(path.parent)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a folder beside ``path``; on success it takes that name, replacing what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tag = uuid.uuid4().hex[:8]
    beside = path.with_name(f".{path.name}.{tag}.tmp")
    old = path.with_name(f".{path.name}.{tag}.old")
    beside.mkdir()
    try:
        yield beside
        for file in beside.rglob("*"):
            if file.is_file():
                flush_to_disk(file)
        if path.exists():
            path.replace(old)
        beside.replace(path)
        flush_to_disk(path.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    with atomic_file(path) as beside:
        beside.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
