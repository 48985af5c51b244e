"""Safetensors files: read headers, write from where tensors lie with a checksum on the way, map."""

import json
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor's place: bytes ``start`` to ``stop`` of its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def write_tensors(
    f: BinaryIO, tensors: Mapping[str, Sequence[torch.Tensor]], metadata: Mapping[str, str]
) -> tuple[int, str]:
    """Write each name's tensors, joined along their first dimension; return bytes and checksum of all.

    Tensors of one name agree in dtype and further dimensions, and there is at least one. The widest
    types should come first, so that each starts at a multiple of its width.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, parts in tensors.items():
        start, rows = end, sum(len(p) for p in parts)
        end += sum(p.numel() * p.element_size() for p in parts)
        shape = [rows, *parts[0].shape[1:]]
        header[name] = {"dtype": _NAMES[parts[0].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    digest.update(len(text).to_bytes(8, "little") + text)
    f.write(len(text).to_bytes(8, "little") + text)
    for piece in (raw(p) for parts in tensors.values() for p in parts):
        digest.update(piece)
        f.write(piece)
    return 8 + len(text) + end, digest.hexdigest()


def parse_header(text: bytes | bytearray) -> tuple[dict[str, Entry], Any]:
    """Return where the tensors of a file lie that has this header, and its metadata, if any.

    Raises: ValueError for a header that is none.
    """
    begin = 8 + len(text)
    try:
        header: dict[str, Any] = json.loads(text)
        metadata = header.pop("__metadata__", None)
        entries = {
            name: Entry(
                value["dtype"], tuple(value["shape"]), *(begin + offset for offset in value["data_offsets"])
            )
            for name, value in header.items()
        }
        for entry in entries.values():
            places = (*entry.shape, entry.start - begin, entry.stop - entry.start)
            if not isinstance(entry.dtype, str) or not all(type(n) is int and n >= 0 for n in places):
                raise ValueError("a place that is none")
            if entry.dtype in DTYPES and entry.stop - entry.start != (
                entry.num_elements * DTYPES[entry.dtype].itemsize
            ):
                raise ValueError("a shape of another size")
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return entries, metadata


def map_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str], mmap.mmap]:
    """Return a file's tensors where they lie, its metadata, and the mapping that all of them keep alive.

    The tensors may be written to: the file keeps what it holds. ``safe_open`` does not show its mapping, and
    the caller has to know when the last tensor is dropped, because only then the file may be written over.
    Raises: ValueError for what is no file of ``write_tensors``; OSError.
    """
    with path.open("rb") as f:
        mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(mapped[:8], "little")
    if not 8 < start <= len(mapped):
        raise ValueError("its header is longer than the file")
    entries, metadata = parse_header(mapped[8:start])
    tensors = {}
    for name, entry in entries.items():
        if entry.dtype not in DTYPES or entry.stop > len(mapped):
            raise ValueError(f"{name} lies outside of the file, or is of an unknown type")
        dtype, count = DTYPES[entry.dtype], entry.num_elements
        flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=entry.start) if count else None
        tensors[name] = torch.empty(entry.shape, dtype=dtype) if flat is None else flat.view(entry.shape)
    return tensors, metadata, mapped


@contextmanager
def mode_of_umask(path: Path) -> Iterator[None]:
    """Give ``path`` the mode of any new file, although a library replaces it by a private one.

    The safetensors library writes a temporary file of mode 0600 and renames it.
    """
    path.touch()  # the process's umask cannot be read without changing it for all threads
    mode = path.stat().st_mode & 0o777
    yield
    path.chmod(mode)


def save_tensors(
    tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write whole tensors. Raises: OSError when the disk refuses, as of any other file."""
    try:
        with mode_of_umask(path):
            save_file(dict(tensors), path, dict(metadata) if metadata else None)
    except SafetensorError as error:
        # Tensors that cannot be written are our mistake and raise ValueError; what is left is the disk.
        raise OSError(f"cannot write {path}: {error}") from None


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """Return one checksum of the bytes of several contiguous CPU tensors."""
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(raw(tensor))
    return digest.hexdigest()


def checksum_of_file(path: Path) -> str:
    """Return the checksum that ``write_tensors`` gave for a file."""
    digest, block = xxhash.xxh3_128(), bytearray(1 << 20)  # a block stays in the cache
    with path.open("rb", buffering=0) as f:
        while count := f.readinto(block):
            digest.update(memoryview(block)[:count])
    return digest.hexdigest()


def raw(tensor: torch.Tensor) -> memoryview:
    """View a CPU tensor's bytes, without copying them where it is contiguous."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
