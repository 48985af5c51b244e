"""What tests need of the machine they run on: a free port, and to wait for what takes as long as it takes."""

import socket
import time
from collections.abc import Callable


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
