"""One writer at a time: a lock that the operating system lets go when its holder dies."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from eyas.errors import UserError

_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


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
    return json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode()


def refusal(what: str, held_by: bytes, remedy: str) -> UserError:
    """Return the error of a writer that comes second."""
    host, process = _read_owner(held_by)
    return UserError(f"{what} is being written by process {process} on {host}", hint=remedy)


def is_dead(held_by: bytes) -> bool:
    """Whether a lock's owner is known to be gone: a process of this host that no longer runs."""
    host, process = _read_owner(held_by)
    if host != socket.gethostname() or not isinstance(process, int):
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _read_owner(held_by: bytes) -> tuple[str, int | str]:
    try:
        value = json.loads(held_by)
        return str(value["host"]), int(value["process"])
    except (ValueError, TypeError, KeyError):
        return "an unknown host", "unknown"


def _locked(path: Path, what: str) -> BinaryIO:
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            held_by = file.read(4096)
            # A file system without locks leaves the file's own word.
            if error.errno in _NO_LOCKS_HERE and (not held_by or is_dead(held_by)):
                return file
            file.close()
            remedy = (
                f"if it no longer runs, remove {path}"
                if error.errno in _NO_LOCKS_HERE
                else "wait for it, or stop it; the same command then goes on"
            )
            raise refusal(what, held_by, remedy) from None
        # The holder before may have removed the file between our opening and our locking it.
        if path.is_file() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()
