"""Where a store lies: a local folder, or a URL of anything that fsspec speaks to.

Both hold the same files under the same names. What differs: a local journal grows line by line, while
an object cannot be appended to, so there each line is an object of its own; a remote shard is fetched
whole into a local cache when it is first read, and read there.
"""

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

from eyas.errors import UserError
from eyas.files import atomic_file, flush_to_disk, remove_folder, remove_litter
from eyas.locks import hold, is_dead, owner, refusal


class Folder(Protocol):
    """Flat names of files; every write is complete or absent."""

    def __truediv__(self, name: str) -> "Folder": ...

    def size(self, name: str) -> int | None:
        """Return a file's bytes, or None when it is not there."""
        ...

    def names(self, pattern: str) -> list[str]: ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, content: bytes) -> None: ...

    def put(self, name: str) -> AbstractContextManager[Path]:
        """Yield a local path to write to; on success it becomes the file ``name``."""
        ...

    def append_line(self, name: str, number: int, line: bytes) -> None:
        """Add a line to the journal ``name``; ``number`` is the shard it tells of."""
        ...

    def local(self, name: str) -> Path:
        """Return a local path that holds the file's bytes."""
        ...

    def forget(self, name: str) -> None:
        """Give back the room that a fetched file takes."""
        ...

    def remove(self, name: str) -> None: ...

    def clear(self) -> None:
        """Remove the folder and all it holds."""
        ...

    def take(self, other: Any) -> None:
        """Become what ``other`` is, a folder of the same kind, instead of what this one holds."""
        ...

    def lock(self) -> AbstractContextManager[None]:
        """Be the only writer. Raises: UserError with the other one's host and process."""
        ...


def folder_of(where: "Path | str | Folder") -> Folder:
    """Return the folder at a local path or an fsspec URL.

    Raises: UserError for a URL whose file system is not known or not installed.
    """
    if isinstance(where, LocalFolder | RemoteFolder):
        return where
    if isinstance(where, str) and "://" in where and not where.startswith("file://"):
        return RemoteFolder(where)
    return LocalFolder(Path(str(where).removeprefix("file://")))


class LocalFolder:
    """The fast path: nothing between the reader and the file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> "LocalFolder":
        return LocalFolder(self.path / name)

    def size(self, name: str) -> int | None:
        path = self.path / name
        return path.stat().st_size if path.is_file() else None

    def names(self, pattern: str) -> list[str]:
        return sorted(p.name for p in self.path.glob(pattern) if p.is_file())

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        with atomic_file(self.path / name) as beside:
            beside.write_bytes(content)

    def put(self, name: str) -> AbstractContextManager[Path]:
        return atomic_file(self.path / name)

    def append_line(self, name: str, number: int, line: bytes) -> None:
        path = self.path / name
        with path.open("ab") as f:
            f.write(line + b"\n")
        flush_to_disk(path)

    def local(self, name: str) -> Path:
        return self.path / name

    def forget(self, name: str) -> None:
        pass

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def clear(self) -> None:
        if self.path.is_dir():
            remove_folder(self.path)

    def take(self, other: Any) -> None:
        self.clear()
        other.path.replace(self.path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        with hold(self.path / ".lock", str(self.path)):
            remove_litter(self.path)
            yield


class RemoteFolder:
    """A folder behind an fsspec URL, such as ``s3://bucket/run/states`` or ``memory://states``."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        try:
            self.fs: Any
            self.fs, self.root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise UserError(
                f"cannot use {url}: {error}", hint="s3:// needs the package s3fs, gs:// needs gcsfs"
            ) from None
        self._cache: Path | None = None

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemoteFolder":
        return RemoteFolder(f"{self.url}/{name}")

    def size(self, name: str) -> int | None:
        self.fs.invalidate_cache(self.root)
        try:
            return int(self.fs.size(self._at(name)))
        except FileNotFoundError:
            return None

    def names(self, pattern: str) -> list[str]:
        self.fs.invalidate_cache(self.root)
        try:
            paths = self.fs.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(n for n in (p.rstrip("/").rpartition("/")[2] for p in paths) if fnmatch(n, pattern))

    def read(self, name: str) -> bytes:
        return bytes(self.fs.cat_file(self._at(name)))

    def write(self, name: str, content: bytes) -> None:
        self.fs.makedirs(self.root, exist_ok=True)
        self.fs.pipe_file(self._at(name), content)

    @contextmanager
    def put(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="eyas-put-") as folder:
            beside = Path(folder) / name
            yield beside
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.put_file(str(beside), self._at(name))

    def append_line(self, name: str, number: int, line: bytes) -> None:
        stem, _, ending = name.rpartition(".")
        self.write(f"{stem}-{number:05d}.{ending}", line + b"\n")

    def local(self, name: str) -> Path:
        if self._cache is None:
            self._cache = Path(tempfile.mkdtemp(prefix="eyas-states-"))
            weakref.finalize(self, shutil.rmtree, self._cache, ignore_errors=True)
        path = self._cache / name
        if not path.is_file():
            with atomic_file(path) as beside:
                self.fs.get_file(self._at(name), str(beside))
        return path

    def forget(self, name: str) -> None:
        if self._cache is not None:
            (self._cache / name).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        if self.size(name) is not None:
            self.fs.rm_file(self._at(name))

    def clear(self) -> None:
        if self.fs.exists(self.root):
            self.fs.rm(self.root, recursive=True)

    def take(self, other: Any) -> None:
        self.clear()
        self.fs.mv(other.root, self.root, recursive=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Object stores have no locks that a dead holder lets go; the object names who holds it."""
        if self.size("lock") is not None:
            held_by = self.read("lock")
            if not is_dead(held_by):
                raise refusal(self.url, held_by, f"if it no longer runs, remove {self.url}/lock")
        self.write("lock", owner())
        try:
            yield
        finally:
            self.remove("lock")

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}"
