"""What tests need of the machine they run on: a port, processes, and time for what takes long."""

import multiprocessing
import socket
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext

# Loaded once, by the server that processes are forked from.
_PRELOADED = [
    *(f"eyas.stages.{stage}" for stage in ("prepare", "regenerate", "extract", "train", "export")),
    "eyas.engines.transformers.engine",
    "transformers.models.llama.modeling_llama",
]


def clean_processes() -> ForkServerContext:
    """Return what starts processes that inherit nothing of this one, with eyas loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(holds: Callable[[], object], limit_s: float = 300, every_s: float = 0.02) -> None:
    """Wait for a condition; the limit is for what hangs, not for a slow machine."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s"
        time.sleep(every_s)
