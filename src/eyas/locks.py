"""One writer at a time: a lock that the operating system lets go when its holder dies."""

import errno
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import psutil
from filelock import lock_descriptor

from eyas.errors import UserError

_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_WAIT = "wait for it, or stop it; the same command then goes on"
_SAME_START_S = 1.0


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock, as its file names it; ``started`` as of ``started_s``."""

    host: str
    process: int | str
    command: str = ""
    started: float | None = None

    @classmethod
    def read(cls, held_by: bytes) -> "Owner":
        """Return the owner that a lock's file names, or an unknown one."""
        try:
            value = json.loads(held_by)
            started = value.get("started")
            return cls(
                str(value["host"]),
                int(value["process"]),
                str(value.get("command", "")),
                None if started is None else float(started),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls("an unknown host", "unknown")


@contextmanager
def hold(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file ``path``, which guards ``what``; it is removed at the end.

    A holder that died, however it died, has let go: its file is taken over.
    Raises: UserError with the holder's host and process, or when nothing can be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _locked(path, what)
    except OSError as error:
        raise UserError(
            f"cannot write to {what}: {error.strerror}",
            hint="set run_dir (--output-dir) to a folder on a disk that can be written",
        ) from None
    try:
        file.truncate(0)
        file.write(owner())
        file.flush()
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held, so that nobody else's is removed
        file.close()


def owner() -> bytes:
    """Return this process as a lock names it."""
    this = Owner(socket.gethostname(), os.getpid(), shlex.join(sys.argv), started_s(os.getpid()))
    return json.dumps(asdict(this)).encode()


def refusal(what: str, held_by: bytes, remedy: str) -> UserError:
    """Return the error of a writer that comes second."""
    by = Owner.read(held_by)
    runs = f"it runs {by.command!r}; " if by.command else ""
    return UserError(f"{what} is being written by process {by.process} on {by.host}", hint=runs + remedy)


def is_dead(held_by: bytes) -> bool:
    """Whether a lock's owner is known to be gone: a process of this host that no longer runs."""
    by = Owner.read(held_by)
    if by.host != socket.gethostname() or not isinstance(by.process, int):
        return False
    if not psutil.pid_exists(by.process):
        return True
    if by.started is None or started_s(by.process) is None:
        return False
    return not is_same(by.process, by.started)  # the number of a dead process is given to a later one


def started_s(pid: int) -> float | None:
    """Return when a process started, or None when it does not run (a zombie does not).

    Units: seconds since the machine started, which no change of its clock moves.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return float(process.create_time() - psutil.boot_time())
    except psutil.NoSuchProcess:
        return None


def is_same(pid: int, started: float) -> bool:
    """Whether a process that started then still runs: a later one of the same number is another."""
    now = started_s(pid)
    return now is not None and abs(now - started) <= _SAME_START_S  # the machine's start is read each time


def _locked(path: Path, what: str) -> BinaryIO:
    """Return the file, locked.

    filelock's ``FileLock`` would leave the file behind. Taking it away asks for its descriptor: the holder
    before may have removed the file between our opening and our locking it.
    """
    while True:
        file = path.open("a+b")
        try:
            ours, remedy = lock_descriptor(file.fileno(), blocking=False), _WAIT
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                file.close()
                raise
            # A file system without locks leaves the owner that the file names.
            held_by = _content(file)
            ours, remedy = not held_by or is_dead(held_by), f"if it no longer runs, remove {path}"
        if not ours:
            held_by = _content(file)
            file.close()
            raise refusal(what, held_by, remedy)
        if _is_file_at(path, file):
            return file
        file.close()


def _is_file_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _content(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read(4096)
