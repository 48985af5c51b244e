"""One process a GPU, started by torch's own launcher: what torchrun does, from the command that trains."""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from eyas.errors import EyasError

# What torchrun tells a rank.
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
             "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip


def launch_ranks(num_ranks: int, arguments: Sequence[str]) -> None:
    """Run ``eyas`` with ``arguments`` in ``num_ranks`` processes of this machine that find each other.

    Raises: SystemExit with the exit code of a process that failed or was interrupted; it has spoken itself.
    EyasError for one that was killed.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.2,
    )
    # Its own account of a failure is a traceback through the launcher.
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        elastic_launch(config, sys.executable)("-m", "eyas", *arguments)
    except SignalException as signalled:
        raise SystemExit(128 + signalled.sigval) from None
    except ChildFailedError as failed:
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        # Ranks that were ended because another one failed have a negative code: a signal.
        if max(codes.values()) < 0:
            rank, code = min(codes.items(), key=lambda item: item[1] == -signal.SIGTERM)
            raise EyasError(
                f"rank {rank} was killed by {signal.Signals(-code).name}",
                hint="look for memory that ran out; the same command goes on from the last checkpoint",
            ) from None
        raise SystemExit(max(codes.values())) from None


@contextmanager
def as_if_alone() -> Iterator[None]:
    """Hide from processes that are started meanwhile that this one is a rank; they see its GPU alone.

    They would take another's GPU otherwise, and look for each other where the ranks have met.
    """
    before = dict(os.environ)
    if (local := before.get("LOCAL_RANK")) is not None and torch.cuda.is_initialized():
        visible = before.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(local)] if visible else local
    for name in before:
        if name in _OF_RANKS or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    try:
        yield
    finally:
        for name in ("CUDA_VISIBLE_DEVICES", *before):
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)
