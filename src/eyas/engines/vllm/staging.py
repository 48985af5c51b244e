"""Files through which worker processes hand states over: complete or absent, with a checksum or a reason.

The layout is safetensors', written by hand so that no byte is copied on the way.
"""

import json
import os
import shutil
import tempfile
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from eyas.errors import ContractError

# Keys of a request's extra arguments: the name of its file, and whether every rank checksums its states.
NAME_KEY = "eyas_file"
WITNESS_KEY = "eyas_witness"
# Files of requests whose states every rank checksums are called so; the connector sees no more than a name.
WITNESS_PREFIX = "witness-"
# Where the connector's replies say what engine it runs in.
FACTS_KEY = "eyas"

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def staging_base(num_bytes: int) -> Path:
    """Return where states are staged: in memory where there is room, else in the temporary folder."""
    shm = Path("/dev/shm")
    roomy = shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 2 * num_bytes
    return shm if roomy else Path(tempfile.gettempdir())


def is_running(pid: int) -> bool:
    """Return whether a process of this machine has that id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@dataclass(frozen=True)
class Finished:
    """A prompt that an engine has computed: where its states will be, and its own next token.

    ``path`` is None when the engine names no file, ``logprob`` when it was not asked for.
    """

    name: str
    path: Path | None
    reason: str
    token: int | None
    logprob: float | None


@dataclass(frozen=True)
class StagedStates:
    """What a worker wrote for one request: states [T, L, D], token_ids [T], the ids of the L layers."""

    states: torch.Tensor
    token_ids: torch.Tensor
    layer_ids: tuple[int, ...]


def layer_digests(states_TLD: torch.Tensor) -> tuple[int, ...]:
    """Return one checksum a layer, to compare what tensor-parallel ranks hold."""
    return tuple(zlib.crc32(_raw(states_TLD[:, i].contiguous())) for i in range(states_TLD.shape[1]))


def write_states(path: Path, staged: StagedStates) -> None:
    """Write ``staged`` under a name beside ``path`` and rename it: a file of that name is whole."""
    states, token_ids = staged.states.contiguous(), staged.token_ids.to(torch.int64).contiguous()
    parts = [_raw(states), _raw(token_ids)]
    checksum = zlib.crc32(parts[1], zlib.crc32(parts[0]))
    ends = [len(parts[0]), len(parts[0]) + len(parts[1])]
    header = {
        "__metadata__": {"crc32": str(checksum), "layer_ids": json.dumps(staged.layer_ids)},
        "states": {
            "dtype": _DTYPES[states.dtype],
            "shape": list(states.shape),
            "data_offsets": [0, ends[0]],
        },
        "token_ids": {"dtype": "I64", "shape": list(token_ids.shape), "data_offsets": ends},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            f.write(part)
    beside.replace(path)


def write_error(path: Path, reason: str) -> None:
    """Leave word for the reader of ``path`` that it will not come, and why."""
    beside = path.with_name(path.name + ".error.tmp")
    try:
        beside.write_text(reason, encoding="utf-8")
    except OSError:  # a full disk still takes an empty file
        beside.touch()
    beside.replace(_error_path(path))


def write_digests(path: Path, rank: int, digests: tuple[int, ...]) -> None:
    """Leave the checksums of the states that ``rank`` holds for the request of ``path``."""
    beside = path.with_name(f"{path.name}.rank{rank}.tmp")
    beside.write_text(json.dumps(digests), encoding="utf-8")
    beside.replace(_digest_path(path, rank))


def take_states(path: Path, timeout_s: float, stop: threading.Event) -> StagedStates:
    """Wait for a file of states, verify it and remove it; the tensor stays mapped until it is dropped.

    Raises: ContractError with the worker's own reason, for a file that does not come or a damaged one,
    or when ``stop`` is set.
    """
    _await(path, timeout_s, stop, _error_path(path))
    try:
        with safe_open(path, framework="pt") as f:
            states, token_ids = f.get_tensor("states"), f.get_tensor("token_ids")
            metadata = f.metadata()
        checksum, layer_ids = int(metadata["crc32"]), tuple(json.loads(metadata["layer_ids"]))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ContractError(f"{path} is damaged: {error}") from None
    if zlib.crc32(_raw(token_ids), zlib.crc32(_raw(states))) != checksum:
        raise ContractError(f"{path} is damaged: its checksum is not the one the worker wrote")
    path.unlink()
    return StagedStates(states, token_ids, layer_ids)


def take_digests(path: Path, rank: int, timeout_s: float, stop: threading.Event) -> tuple[int, ...]:
    """Wait for the checksums of one rank and remove them. Raises: as ``take_states``."""
    digests = _digest_path(path, rank)
    _await(digests, timeout_s, stop, _error_path(path))
    value = tuple(int(d) for d in json.loads(digests.read_text(encoding="utf-8")))
    digests.unlink()
    return value


def _await(path: Path, timeout_s: float, stop: threading.Event, error: Path) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if error.exists():
            reason = error.read_text(encoding="utf-8")
            error.unlink()
            raise ContractError(f"the worker could not hand over the states: {reason or 'disk full?'}")
        if stop.is_set():
            raise ContractError(f"nobody waits for {path.name} any more")
        if time.monotonic() > deadline:
            raise ContractError(f"the worker wrote no {path.name} within {timeout_s:.0f} s")
        time.sleep(0.001)


def _error_path(path: Path) -> Path:
    return path.with_name(path.name + ".error")


def _digest_path(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank{rank}")


def _raw(tensor: torch.Tensor) -> memoryview:
    """View a contiguous CPU tensor's bytes without copying them."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.view(-1).view(torch.uint8).numpy().data
