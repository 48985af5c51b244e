"""Where rows come from: files of several formats, folders, globs, standard input, hub data sets."""

import atexit
import bz2
import codecs
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from eyas.errors import UserError
from eyas.files import sha256_of_file

STDIN = "-"
HUB_PREFIX = "hf:"
BROKEN = "broken_line"
_FORMATS = (".jsonl", ".ndjson", ".json", ".parquet")
_COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
_PARQUET_ROWS = 256
_ENTRIES_NAMED = 8
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Row:
    """One entry of a source as it was read; ``place`` names it for a person (file and line)."""

    place: str
    value: Any


@dataclass(frozen=True)
class Drop:
    """A row that became neither conversation nor sample, and why."""

    row_id: str
    source: str
    reason: str


def read_source(source: str) -> Iterator[Row | Drop]:
    """Yield the rows of a source in order, a few in memory at a time.

    Raises: UserError when there is nothing of that name or its format is unknown.
    """
    if source.startswith(HUB_PREFIX):
        yield from _read_hub(source)
        return
    for path in source_files(source):
        yield from _read_file(path, "stdin" if source == STDIN else str(path))


def source_files(source: str) -> list[Path]:
    """Return the files that a path, folder, glob or ``-`` stands for, in a fixed order.

    Raises: UserError when there are none.
    """
    return _files_and_rest(source)[0]


def entries_left_out(source: str) -> list[str]:
    """Return what a folder or glob has besides data files: other files, hidden names, links to folders."""
    if source.startswith(HUB_PREFIX) or source == STDIN:
        return []
    return _files_and_rest(source)[1]


def _files_and_rest(source: str) -> tuple[list[Path], list[str]]:
    if source == STDIN:
        return [_spooled_stdin()], []
    path = Path(source).expanduser()
    if path.is_file():
        return [path], []
    if path.is_dir():
        found, rest = _walk(path)
        if not found:
            holds = f"; it holds {_some(rest, path)}" if rest else ""
            raise UserError(
                f"the folder {source} holds no data files{holds}",
                hint=f"known: {', '.join(_FORMATS)}; names that begin with a dot are left out",
            )
        return found, rest
    matched = sorted(map(Path, glob.glob(str(path), recursive=True)))
    found = [p for p in matched if p.is_file()]
    if not found:
        only = f"; it matches only {_some([f'{p}/' for p in matched])}" if matched else ""
        raise UserError(
            f"there is no data file {source}{only}",
            hint="data.sources takes files, folders, globs, - for standard input, and hf:owner/name:split",
        )
    above = {parent for file in found for parent in file.parents}
    return found, [f"{p}/" for p in matched if not p.is_file() and p not in above]


def _walk(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the data files below a folder, and everything else, a hidden folder as one entry."""
    found, rest = [], []
    for parent, folders, files in os.walk(folder):
        paths = [Path(parent, name) for name in folders]
        closed = [p for p in paths if p.name.startswith(".") or p.is_symlink()]
        folders[:] = sorted(p.name for p in paths if p not in closed)
        rest += [f"{p}/" for p in closed]
        for path in (Path(parent, name) for name in files):
            is_data = path.is_file() and _format_of(path.name) and not path.name.startswith(".")
            found.append(path) if is_data else rest.append(str(path))
    return sorted(found), sorted(rest)


def _some(entries: list[str], folder: Path | None = None) -> str:
    """Name the first entries, and how many more there are."""
    names = [e.removeprefix(f"{folder}/") if folder else e for e in entries[:_ENTRIES_NAMED]]
    more = len(entries) - len(names)
    return ", ".join(names) + (f" and {more:,} more" if more else "")


def source_fingerprint(source: str) -> str:
    """Identify what a source holds: the names and bytes of its files, or a hub data set's name."""
    if source.startswith(HUB_PREFIX):
        return source
    files = source_files(source)
    if len(files) == 1:
        return sha256_of_file(files[0])
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path}\0{sha256_of_file(path)}\0".encode())
    return digest.hexdigest()


@cache
def _spooled_stdin() -> Path:
    """Copy standard input to a temporary file: it can be read once, but is fingerprinted first."""
    with tempfile.NamedTemporaryFile(prefix="eyas-stdin-", delete=False) as spool:
        while chunk := sys.stdin.buffer.read(_CHUNK):
            spool.write(chunk)
    path = Path(spool.name)
    atexit.register(path.unlink, missing_ok=True)
    return path


def _format_of(name: str) -> str | None:
    suffixes = [s.lower() for s in Path(name).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in _FORMATS else None


def _read_file(path: Path, name: str) -> Iterator[Row | Drop]:
    with path.open("rb") as raw:
        magic = raw.read(6)
    if magic.startswith(b"PAR1"):
        yield from _read_parquet(path, name)
        return
    try:
        with _decompressed(path, magic) as stream:
            if _is_one_value(stream):
                yield from _read_values(stream, name)
            else:
                yield from _read_lines(stream, name)
    except (EOFError, OSError, lzma.LZMAError) as error:
        # A torn archive loses an unknown number of rows, so it is never a mere drop.
        raise UserError(f"{name} cannot be decompressed to its end: {error}") from None


def _decompressed(path: Path, magic: bytes) -> BinaryIO:
    """Open a file by what its first bytes say, whatever its name is."""
    if magic.startswith(b"\x1f\x8b"):
        return io.BufferedReader(gzip.open(path, "rb"), _CHUNK)
    if magic.startswith(b"BZh"):
        return io.BufferedReader(bz2.open(path, "rb"), _CHUNK)
    if magic.startswith(b"\xfd7zXZ"):
        return io.BufferedReader(lzma.open(path, "rb"), _CHUNK)
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"), _CHUNK)
    return path.open("rb", buffering=_CHUNK)


def _is_one_value(stream: Any) -> bool:
    """Tell a JSON array of rows, or a pretty-printed object, from one row a line."""
    head = stream.peek(_CHUNK)[:_CHUNK].removeprefix(b"\xef\xbb\xbf").lstrip()
    first = head.split(b"\n", 1)[0].strip()
    if not head.startswith(b"["):
        return bool(first == b"{")
    # A line can itself be a list: of messages, which have a role, not of rows.
    try:
        messages = json.loads(first)
    except (ValueError, RecursionError):
        return True
    return not (
        messages and isinstance(messages[0], dict) and ("role" in messages[0] or "from" in messages[0])
    )


def _read_lines(stream: Iterable[bytes], name: str) -> Iterator[Row | Drop]:
    for number, raw in enumerate(stream, start=1):
        place = f"{name}:{number}"
        try:
            # utf-8-sig: a byte order mark in front of the first line is not data.
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            value = json.loads(text) if text else None
        except (ValueError, RecursionError):
            yield Drop(place, place, BROKEN)
            continue
        if text:
            yield Row(place, value)


def _read_values(stream: BinaryIO, name: str) -> Iterator[Row | Drop]:
    """Read values one after the other, or the elements of an array, without loading the whole file."""
    values = json.JSONDecoder()
    text = codecs.getincrementaldecoder("utf-8-sig")()
    buffer, number, in_array = "", 0, None
    at_end = False
    while True:
        buffer = buffer.lstrip()
        if in_array is None and buffer:
            in_array = buffer[0] == "["
            buffer = buffer[1:] if in_array else buffer
            continue
        buffer = buffer.lstrip(", \t\r\n")
        if in_array and buffer.startswith("]"):
            return
        place = f"{name}:{number + 1}"
        try:
            value, end = values.raw_decode(buffer)
            # A number or a word could go on in the next chunk; rows are objects, which close themselves.
            buffer, number = buffer[end:], number + 1
            yield Row(place, value)
            continue
        except RecursionError:  # no more text makes it less deep
            yield Drop(place, place, BROKEN)
            return
        except ValueError:
            pass
        if at_end:
            if buffer or in_array:
                yield Drop(place, place, BROKEN)
            return
        chunk = stream.read(max(_CHUNK, len(buffer)))  # doubling keeps a huge value linear to read
        at_end = not chunk
        try:
            buffer += text.decode(chunk, final=at_end)
        except UnicodeDecodeError:
            yield Drop(place, place, BROKEN)
            return


def _read_parquet(path: Path, name: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        for batch in pq.ParquetFile(path).iter_batches(_PARQUET_ROWS):
            for value in batch.to_pylist():
                number += 1
                yield Row(f"{name}:{number}", without_nulls(value))
    except pa.ArrowException as error:
        raise UserError(f"{name} is not a sound parquet file: {str(error).splitlines()[0]}") from None


def _read_hub(source: str) -> Iterator[Row]:
    """Stream a hub data set: ``hf:owner/name@revision:config:split``; revision and config may be left out."""
    match = re.fullmatch(r"hf:([^:@]+)(?:@([^:]+))?(?::([^:]+))?:([^:]+)", source)
    if match is None:
        raise UserError(f"cannot read the data source {source!r}", hint="write hf:owner/name:split")
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise UserError(
            f"{source} needs the datasets library", hint="pip install 'eyas[hub]', or download its files"
        ) from None
    # Of its client: no OSError where nobody answers.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    name, revision, config, split = match.groups()
    try:
        rows = datasets.load_dataset(name, config, split=split, revision=revision, streaming=True)
        for number, value in enumerate(rows, start=1):
            yield Row(f"{source}:{number}", without_nulls(value))
    except (ValueError, OSError, HTTPError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{source} cannot be read: {str(error).splitlines()[0]}",
            hint="check the spelling, the network, and hf auth login for gated data",
        ) from None


def without_nulls(value: Any) -> Any:
    """Remove null fields below a row: tables give every struct the union of all fields, null where absent."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    return value
