"""The processes that train one draft together: who they are, and their sums.

Every rank holds the whole draft and makes the gradients of its own micro-batches; sums over all ranks, taken
once a step, make them the gradients of the global batch. A sum that is started early runs beside what the
device still computes.
"""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from eyas.errors import ContractError, EyasError, UserError

Value = TypeVar("Value")
Batch = TypeVar("Batch")


@dataclass
class Ranks:
    """This process among ``size``; alone, nothing is ever sent."""

    rank: int = 0
    size: int = 1
    _started: list[Any] = field(default_factory=list, repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by its sum over the ranks; on a GPU, the stream waits and the host does not."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def start_adding_up(self, tensor: torch.Tensor) -> None:
        """Start what ``add_up`` does; ``tensor`` must be left alone until ``finish_adding_up``."""
        if self.size > 1:
            self._started.append(dist.all_reduce(tensor, async_op=True))

    def finish_adding_up(self) -> None:
        for work in self._started:
            work.wait()
        self._started.clear()

    def on_first(self, work: Callable[[], Value]) -> Value:
        """Do ``work`` on rank 0 and return what it returned on every rank, once it is done.

        An error of it is raised there; the other ranks leave with its exit code and say nothing.
        """
        if self.size == 1:
            return work()
        error: BaseException | None = None
        told: list[Any] = [None, 0]
        if self.is_first:
            try:
                told[0] = work()
            except Exception as raised:
                error, told[1] = raised, getattr(raised, "exit_code", EyasError.exit_code)
        dist.broadcast_object_list(told, src=0)
        if error is not None:
            raise error
        if told[1]:
            raise SystemExit(told[1])
        value: Value = told[0]
        return value

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's ``value``, by rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def check_same(self, what: str, value: Any, hint: str) -> None:
        """Raises: ContractError where rank 0's value is not this rank's."""
        for rank, (host, other) in enumerate(first := self.gather((platform.node(), value))):
            if other != first[0][1]:
                raise ContractError(
                    f"{what}: {first[0][1]} on rank 0 ({first[0][0]}), {other} on rank {rank} ({host})",
                    hint=hint,
                )


def join_ranks(device: str) -> Ranks:
    """Return this process's place among those that torchrun started with it, connected; else alone.

    ``device`` is cuda or cpu. On a GPU machine each process takes the GPU of its local rank.
    Raises: UserError for fewer GPUs than processes.
    """
    if not dist.is_torchelastic_launched():
        return Ranks()
    local, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if device == "cuda":
        check_gpus(size)
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        if device == "cuda":
            dist.init_process_group("nccl", device_id=torch.device("cuda", local))
        else:
            dist.init_process_group("gloo")
    return Ranks(dist.get_rank(), dist.get_world_size())


def leave_ranks() -> None:
    """Disconnect, so that the others notice neither late nor by a timeout."""
    if dist.is_initialized():
        dist.destroy_process_group()


def check_device(name: str) -> None:
    """Raises: UserError for a ``train.device`` that this machine does not have."""
    kind, _, number = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and not number.isdigit()):
        raise UserError(f"train.device={name} is not a device", hint="set train.device to cpu, cuda or auto")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= found:
        raise UserError(f"train.device={name}: there are {found} GPUs here", hint="set train.device=auto")


def check_gpus(wanted: int) -> None:
    """Raises: UserError when this machine has fewer GPUs than processes are to be started on it."""
    found = torch.cuda.device_count()
    if wanted > found:
        raise UserError(
            f"{wanted} processes were asked for on this machine, which has {found} GPUs",
            hint=f"set train.num_gpus={found} (torchrun: --nproc-per-node {found})",
        )


def shares_of(step: Sequence[Batch], costs: Sequence[float], num_ranks: int) -> list[list[Batch]]:
    """Return the micro-batches of one step that each rank computes, so that ranks finish together.

    ``costs`` are those of the step's micro-batches. The dearest go out first, each to the rank with the
    least to do among those that still have a place: all ranks get equally many, or one fewer. Rank 0 always
    gets one.
    """
    if num_ranks == 1:
        return [list(step)]
    places = -(-len(step) // num_ranks)
    load = [0.0] * num_ranks
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for i in sorted(range(len(step)), key=lambda i: -costs[i]):
        rank = min((r for r in range(num_ranks) if len(shares[r]) < places), key=lambda r: (load[r], r))
        shares[rank].append(i)
        load[rank] += costs[i]
    return [[step[i] for i in share] for share in shares]


def check_shared(ranks: Ranks, folder: Path) -> None:
    """Raises: UserError when some rank does not see what the first one has just written to ``folder``."""
    for host, seen in ranks.gather((platform.node(), (folder / "stage.json").is_file())):
        if not seen:
            raise UserError(
                f"{host} does not see {folder}, which the first machine has just written",
                hint="run_dir must lie on a file system that all machines share",
            )
