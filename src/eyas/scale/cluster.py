"""The Ray cluster of a run: started in this process's machine, or joined; looked at before work starts."""

import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from eyas.config.schema import FleetSettings
from eyas.errors import UserError

_AUTH_MODE = "RAY_AUTH_MODE"
# By default ray start --head asks for a token where one lies, and who joins shows it only when told to.
_TOKEN = f"where Ray asks for a token, set {_AUTH_MODE}=token and have the head's ~/.ray/auth_token"


class ClusterAddress(NamedTuple):
    """Where a cluster is, for other processes that join it, and how they are to show who they are."""

    address: str
    auth_mode: str | None


def joined(address: ClusterAddress) -> AbstractContextManager[ClusterAddress]:
    """Join the cluster that another process of this run has started or joined; before ``ray`` is imported."""
    if address.auth_mode is not None:
        os.environ[_AUTH_MODE] = address.auth_mode
    return cluster(address.address, 0)


@contextmanager
def cluster(address: str | None, num_cpus: int) -> Iterator[ClusterAddress]:
    """Join the cluster at ``address``, or start one on this machine with at least ``num_cpus`` slots.

    One that is connected already is used and left as it is.
    Raises: UserError when Ray is not installed or nobody answers.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed", hint="pip install 'eyas[ray]'")
    # Read when Ray is first imported: it would report to its makers otherwise.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        yield _current_address()
        return
    if address is not None and address != "auto":
        _knock(address)
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if in_main else None
    quiet = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
    try:
        if address is None:
            ray.init(num_cpus=max(num_cpus, os.cpu_count() or 1), **quiet)
        else:
            ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except ConnectionError as error:
        raise _nobody(str(address), error) from None
    except RuntimeError as error:
        # Ray compares its own and Python's versions, and says which differ.
        raise UserError(
            f"cannot join the Ray cluster at {address}: {' '.join(str(error).split())}",
            hint="every machine needs the same versions of Python and Ray",
        ) from None
    except ray.exceptions.RayError as error:  # a token that is asked for and not there
        raise UserError(f"cannot join the Ray cluster at {address}: {error}", hint=_TOKEN) from None
    if in_main:  # Ray would end this process at once, with a trace of its own
        signal.signal(signal.SIGTERM, before)
    try:
        yield _current_address()
    finally:
        ray.shutdown()


def _current_address() -> ClusterAddress:
    import ray

    # Ray sets it where it starts a cluster.
    return ClusterAddress(str(ray.get_runtime_context().gcs_address), os.environ.get(_AUTH_MODE))


def _knock(address: str) -> None:
    """Raises: UserError when nothing listens at ``address``; Ray itself would try for minutes, and abort."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"ray.address={address} is not HOST:PORT", hint="such as 10.0.0.1:6379, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise _nobody(address, error) from None


def _nobody(address: str, error: Exception) -> UserError:
    return UserError(
        f"no Ray cluster answers at {address}: {str(error).strip().splitlines()[0]}",
        hint="start one there (ray start --head), or leave ray.address out to use this machine alone; "
        + _TOKEN,
    )


def check_room(fleet: FleetSettings) -> None:
    """Raises: UserError when the cluster's machines cannot hold the fleet, whatever else they do."""
    import ray

    wanted = {"CPU": 1.0, "GPU": float(fleet.gpus_per_replica)}
    nodes = {n["NodeManagerHostname"] + n["NodeID"][:4]: n["Resources"] for n in ray.nodes() if n["Alive"]}
    fitting = {
        name: int(min(has.get(key, 0.0) // amount for key, amount in wanted.items() if amount))
        for name, has in nodes.items()
    }
    if sum(fitting.values()) < fleet.replicas:
        has = ", ".join(f"{has.get('GPU', 0):.0f} on {name}" for name, has in nodes.items())
        raise UserError(
            f"{fleet.replicas} replicas of {fleet.gpus_per_replica} GPUs were asked for, "
            f"{sum(fitting.values())} fit the cluster (GPUs: {has})",
            hint=f"set extract.fleet.replicas={max(1, sum(fitting.values()))} or add machines",
        )
