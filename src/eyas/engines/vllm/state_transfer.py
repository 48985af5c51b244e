"""Files through which worker processes hand states over: complete or absent, with a checksum or a reason.

In a folder of an engine's own (``make_spare``) a file whose states nobody holds any more is written over by
the worker: memory that is new to a machine takes longer to get than to write, and more so a virtual one.
"""

import json
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.errors import ContractError
from eyas.row_stats import measure_rows
from eyas.safetensors_io import checksum, map_tensors, write_tensors

# Keys of a request's extra arguments: the name of its file, and whether every rank checksums its states.
NAME_KEY = "eyas_file"
WITNESS_KEY = "eyas_witness"
# Files of requests whose states every rank checksums are called so; the connector sees no more than a name.
WITNESS_PREFIX = "probe_output-"
# What a file of states holds; a server and its client must agree.
STAGING_FORMAT = 2
# Where the connector's replies say what engine it runs in.
FACTS_KEY = "eyas"
# The folder, in the folder of staging, of files to be written over, and from what size on it is worth it.
_SPARE = "spare"
_MIN_SPARE = 1 << 20


def staging_base(num_bytes: int) -> Path:
    """Return where states are staged: in memory where there is room, else in the temporary folder."""
    shm = Path("/dev/shm")
    roomy = shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 2 * num_bytes
    return shm if roomy else Path(tempfile.gettempdir())


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
    """What a worker wrote for one request of T tokens, layers ascending.

    Shapes: lower [T, L - 1, D], all layers but the last; last [T, D]; figures [T, L, 4], those of
    ``eyas.row_stats``; token_ids [T]; layer_ids of all L.
    """

    lower: torch.Tensor
    last: torch.Tensor
    figures: torch.Tensor
    token_ids: torch.Tensor
    layer_ids: tuple[int, ...]

    @classmethod
    def split(
        cls,
        states_TLD: torch.Tensor,
        token_ids: torch.Tensor,
        layer_ids: tuple[int, ...],
        figures: torch.Tensor | None = None,
    ) -> "StagedStates":
        """Measure the states, unless that is done, and part them as shards want them; best on a GPU."""
        lower, last = states_TLD[:, :-1].contiguous(), states_TLD[:, -1].contiguous()
        figures = measure_rows(states_TLD) if figures is None else figures
        return cls(lower, last, figures, token_ids, layer_ids)

    def parts(self, lengths: Sequence[int]) -> list["StagedStates"]:
        """Part what lies together of several requests, one after another."""
        tensors = (self.lower, self.last, self.figures, self.token_ids)
        parts = zip(*(tensor.split(list(lengths)) for tensor in tensors), strict=True)
        return [
            StagedStates(lower, last, figures, ids, self.layer_ids) for lower, last, figures, ids in parts
        ]

    @property
    def states(self) -> torch.Tensor:
        """All layers, [T, L, D]."""
        return torch.cat([self.lower, self.last[:, None]], dim=1)


def layer_digests(states_TLD: torch.Tensor) -> tuple[str, ...]:
    """Return one checksum a layer, to compare what tensor-parallel ranks hold."""
    return tuple(checksum([states_TLD[:, i].contiguous()]) for i in range(states_TLD.shape[1]))


def write_states(path: Path, staged: StagedStates) -> None:
    """Write ``staged`` under a name beside ``path`` and rename it: a file of that name is whole."""
    parts = {
        "token_ids": [staged.token_ids.to(torch.int64)],
        "figures": [staged.figures],
        "lower": [staged.lower],
        "last": [staged.last],
    }
    metadata = {
        "checksum": checksum(part for (part,) in parts.values()),
        "layer_ids": json.dumps(staged.layer_ids),
    }
    beside = path.with_name(path.name + ".tmp")
    with beside.open("r+b" if _claim_spare(beside) else "wb") as f:
        write_tensors(f, parts, metadata)
        f.truncate()
    beside.replace(path)


def hand_over(path: Path, rank: int, is_witness: bool, make: Callable[[], StagedStates]) -> None:
    """Write what ``make`` gives, a probe_output's checksums first; only rank 0 writes states.

    Where that fails the reason is left instead. Raises: what failed, when even that cannot be written.
    """
    try:
        staged = make()
        if is_witness:
            write_digests(path, rank, layer_digests(staged.states))
        if rank == 0:
            write_states(path, staged)
    except BaseException as error:
        try:
            write_error(path, f"{type(error).__name__}: {error}")
        except OSError:
            raise error from None


def to_pinned(on_device: torch.Tensor) -> torch.Tensor:
    """Start copying to the host, on the current stream."""
    host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
    return host.copy_(on_device, non_blocking=True)


def make_spare(staging: Path) -> None:
    """Have files in ``staging`` written over instead of removed."""
    (staging / _SPARE).mkdir()


def _claim_spare(path: Path) -> bool:
    """Rename a file that nobody needs to ``path``, if there is one."""
    with suppress(FileNotFoundError), os.scandir(path.parent / _SPARE) as spares:
        for spare in spares:
            with suppress(FileNotFoundError):  # another thread was faster
                os.rename(spare, path)
                return True
    return False


def write_error(path: Path, reason: str) -> None:
    """Leave word for the reader of ``path`` that it will not come, and why."""
    beside = path.with_name(path.name + ".error.tmp")
    try:
        beside.write_text(reason, encoding="utf-8")
    except OSError:  # a full disk still takes an empty file
        beside.touch()
    beside.replace(_error_path(path))


def write_digests(path: Path, rank: int, digests: tuple[str, ...]) -> None:
    """Leave the checksums of the states that ``rank`` holds for the request of ``path``."""
    beside = path.with_name(f"{path.name}.rank{rank}.tmp")
    beside.write_text(json.dumps(digests), encoding="utf-8")
    beside.replace(_digest_path(path, rank))


def take_states(path: Path, timeout_s: float, stop: threading.Event) -> StagedStates:
    """Wait for a file of states, verify it and remove it; the tensors stay mapped until they are dropped.

    Where there is a folder of spare files, a large one goes there once its last tensor has been dropped.
    Raises: ContractError with the worker's own reason, for a file that does not come or a damaged one,
    or when ``stop`` is set.
    """
    _await(path, timeout_s, stop, _error_path(path))
    try:
        tensors, metadata, mapped = map_tensors(path)
        token_ids, figures, lower, last = (tensors[n] for n in ("token_ids", "figures", "lower", "last"))
        written, layer_ids = metadata["checksum"], tuple(json.loads(metadata["layer_ids"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ContractError(f"{path} is damaged: {error}") from None
    if checksum([token_ids, figures, lower, last]) != written:
        raise ContractError(f"{path} is damaged: its checksum is not the one the worker wrote")
    spare = path.parent / _SPARE
    if len(mapped) >= _MIN_SPARE and spare.is_dir():
        weakref.finalize(mapped, _set_aside, path, spare / path.name).atexit = False
    else:
        path.unlink()
    return StagedStates(lower, last, figures, token_ids, layer_ids)


def _set_aside(path: Path, spare: Path) -> None:
    with suppress(OSError):  # the whole folder is gone, once its engine has been closed
        path.rename(spare)


def take_digests(path: Path, rank: int, timeout_s: float, stop: threading.Event) -> tuple[str, ...]:
    """Wait for the checksums of one rank and remove them. Raises: as ``take_states``."""
    digests = _digest_path(path, rank)
    _await(digests, timeout_s, stop, _error_path(path))
    value = tuple(str(d) for d in json.loads(digests.read_text(encoding="utf-8")))
    digests.unlink()
    return value


def _await(path: Path, timeout_s: float, stop: threading.Event, error: Path) -> None:
    deadline = time.monotonic() + timeout_s
    wanted, failed = os.fspath(path), os.fspath(error)  # cheap to ask for: other threads want the interpreter
    while not os.path.exists(wanted):
        if os.path.exists(failed):
            reason = error.read_text(encoding="utf-8")
            error.unlink()
            raise ContractError(f"the worker could not hand over the states: {reason or 'disk full?'}")
        if stop.is_set():
            raise ContractError(f"nobody waits for {path.name} any more")
        if time.monotonic() > deadline:
            raise ContractError(f"the worker wrote no {path.name} within {timeout_s:.0f} s")
        time.sleep(0.002)


def _error_path(path: Path) -> Path:
    return path.with_name(path.name + ".error")


def _digest_path(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank{rank}")
