"""Files that are complete or absent, and fingerprints of what they hold."""

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from eyas.errors import ContractError


def fingerprint(value: Any) -> str:
    """Return 16 hex digits that identify a JSON-like value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def seal(value: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON-like value with a checksum of itself, so that no changed byte is believed."""
    return {**value, "seal": fingerprint(json.loads(json.dumps(value)))}


class OtherVersionError(ValueError):
    """What was sealed has the format of another version of eyas."""


def unseal(value: Any, version: int | None = None) -> dict[str, Any]:
    """Return what was sealed, without its checksum; of format ``version``, where it has one.

    Raises: ValueError when it is not what was sealed; OtherVersionError for another format.
    """
    if version is not None and value["format_version"] != version:
        raise OtherVersionError(f"format version {value['format_version']}, this eyas reads {version}")
    if not isinstance(value, dict) or not isinstance(value.get("seal"), str):
        raise ValueError("it has no checksum of itself")
    rest = {k: v for k, v in value.items() if k != "seal"}
    if fingerprint(rest) != value["seal"]:
        raise ValueError("its checksum is not the one written")
    return rest


@contextmanager
def refusing_damaged(where: object, hint: str) -> Iterator[None]:
    """Turn errors of reading a sealed file into words for the user; ``hint`` mends a damaged one.

    Raises: ContractError naming ``where``.
    """
    try:
        yield
    except OtherVersionError as error:
        raise ContractError(
            f"{where} has {error}", hint="make it again with --fresh, or use the eyas that wrote it"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ContractError(f"{where} is damaged: {error}", hint=hint) from None


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
        for entry in (*beside.rglob("*"), beside):
            flush_to_disk(entry)
        if path.exists():
            path.replace(old)
        beside.replace(path)
        flush_to_disk(path.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


_LITTER = re.compile(r"\..+\.[0-9a-f]{8}\.(tmp|old)")


def remove_litter(folder: Path) -> None:
    """Remove what a killed process left under temporary names below ``folder``, whole folders first."""
    for at, folders, files in os.walk(folder):
        for name in filter(_LITTER.fullmatch, folders):
            _remove_tree(Path(at, name))
        for name in filter(_LITTER.fullmatch, files):
            Path(at, name).unlink()


def remove_folder(path: Path) -> None:
    """Remove a folder, or a link to one; a process killed meanwhile leaves the whole folder, or litter."""
    with removing(path):
        pass


def absent_folders(path: Path) -> list[Path]:
    """Return ``path`` and the folders above it that do not exist yet, the deepest first."""
    return [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of the folders that exist and hold nothing."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def removing(path: Path) -> Iterator[None]:
    """Rename a folder, or a link to one, for the block that puts another in its place; then remove it."""
    old = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old")
    path.replace(old)
    yield
    _remove_tree(old)


def _remove_tree(path: Path) -> None:
    """Remove a folder with all it holds; of a link, the link alone."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def write_json(path: Path, value: Any) -> None:
    with atomic_file(path) as beside:
        beside.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
