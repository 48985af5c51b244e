"""One process a GPU, started by torch's own launcher: what torchrun does, from the command that trains."""

import logging
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch_ranks(num_ranks: int, arguments: Sequence[str]) -> None:
    """Run ``eyas`` with ``arguments`` in ``num_ranks`` processes of this machine that find each other.

    Raises: SystemExit with the exit code of a process that failed or was interrupted; it has spoken itself.
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
        codes = [failure.exitcode for failure in failed.failures.values()]
        # Ranks that were ended because another one failed have a negative code: a signal.
        raise SystemExit(max([1, *codes])) from None
