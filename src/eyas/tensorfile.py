"""Safetensors files written from where their tensors lie, their checksum made on the way; and mapped."""

import json
import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


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
        header[name] = {"dtype": _DTYPES[parts[0].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    digest.update(len(text).to_bytes(8, "little") + text)
    f.write(len(text).to_bytes(8, "little") + text)
    for piece in (raw(p) for parts in tensors.values() for p in parts):
        digest.update(piece)
        f.write(piece)
    return 8 + len(text) + end, digest.hexdigest()


def map_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str], mmap.mmap]:
    """Return a file's tensors where they lie, its metadata, and the mapping that all of them keep alive.

    The tensors may be written to: the file keeps what it holds.
    Raises: ValueError for what is no file of ``write_tensors``; OSError.
    """
    with path.open("rb") as f:
        mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(mapped[:8], "little")
    if not 8 < start <= len(mapped):
        raise ValueError("its header is longer than the file")
    header = json.loads(mapped[8:start])
    try:
        metadata = header.pop("__metadata__")
        entries = [(n, _BY_NAME[e["dtype"]], e["shape"], *e["data_offsets"]) for n, e in header.items()]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header lacks {error}") from None
    tensors = {}
    for name, dtype, shape, first, end in entries:
        count = math.prod(shape)
        if min(first, count) < 0 or end - first != count * dtype.itemsize or start + end > len(mapped):
            raise ValueError(f"{name} lies outside of the file")
        flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=start + first) if count else None
        tensors[name] = torch.empty(shape, dtype=dtype) if flat is None else flat.view(shape)
    return tensors, metadata, mapped


def save_tensors(
    tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write whole tensors. Raises: OSError when the disk refuses, as of any other file."""
    try:
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
