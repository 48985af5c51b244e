"""Safetensors files written from where their tensors lie, their checksum made on the way."""

import json
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
