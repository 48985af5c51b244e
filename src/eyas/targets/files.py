"""The files of a target, by byte range: in a folder, or where the folder says that its weights lie."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from eyas.errors import UserError
from eyas.files import read_json

# In a folder that describes a target without holding its weights: {"url": where they lie}.
ELSEWHERE = "weights_elsewhere.json"
_REQUESTS_AT_A_TIME = 32

T = TypeVar("T")
R = TypeVar("R")


class Files(Protocol):
    """What reading single tensors takes of a place; ``where`` names it in messages."""

    @property
    def where(self) -> str: ...

    def weight_files(self) -> list[str]: ...

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes, or None when there is no such file."""
        ...

    def read(self, name: str, start: int, stop: int) -> bytearray:
        """Return bytes ``start`` to ``stop``; fewer where the file ends."""
        ...

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Apply a function that reads to each item, in order; many at a time where each one waits."""
        ...


@dataclass(frozen=True)
class LocalFiles:
    folder: Path

    @property
    def where(self) -> str:
        return str(self.folder)

    def weight_files(self) -> list[str]:
        return sorted(p.name for p in self.folder.glob("*.safetensors"))

    def size(self, name: str) -> int | None:
        path = self.folder / name
        return path.stat().st_size if path.is_file() else None

    def read(self, name: str, start: int, stop: int) -> bytearray:
        with (self.folder / name).open("rb") as f:
            f.seek(start)
            out = bytearray(stop - start)
            view, filled = memoryview(out), 0
            while filled < len(out):
                got = f.readinto(view[filled : filled + (1 << 30)])
                if not got:
                    break
                filled += got
        del view
        return out if filled == len(out) else out[:filled]

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        return map(function, items)


class RemoteFiles:
    """A model folder behind an fsspec URL: hf://owner/name@revision, s3://, gs://, https://."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._fs, self._root = open_url(self._url)
        self._sizes: dict[str, int | None] = {}

    @property
    def where(self) -> str:
        return self._url

    def weight_files(self) -> list[str]:
        try:
            found = self._fs.ls(self._root, detail=False)
        except unreachable(NotImplementedError):
            found = []  # a plain web server lists nothing
        names = [str(p).rstrip("/").rpartition("/")[2] for p in found]
        return sorted(n for n in names if n.endswith(".safetensors")) or (
            ["model.safetensors"] if self.size("model.safetensors") is not None else []
        )

    def size(self, name: str) -> int | None:
        if name not in self._sizes:
            self._sizes[name] = self._ask_size(name)
        return self._sizes[name]

    def _ask_size(self, name: str) -> int | None:
        try:
            return int(self._fs.size(self._path(name)))
        except FileNotFoundError:
            return None
        except unreachable(TypeError) as error:
            raise self._unreachable(name, error) from None

    def read(self, name: str, start: int, stop: int) -> bytearray:
        try:
            if self._fs.async_impl:
                return bytearray(self._fs.cat_file(self._path(name), start=start, end=stop))
            # Its files read ahead by default: megabytes for a few bytes.
            with self._fs.open(self._path(name), "rb", cache_type="none") as f:
                f.seek(start)
                return bytearray(f.read(stop - start))
        except unreachable() as error:
            raise self._unreachable(name, error) from None

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        waiting: deque[Future[R]] = deque()
        with ThreadPoolExecutor(_REQUESTS_AT_A_TIME) as pool:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) >= 2 * _REQUESTS_AT_A_TIME:  # what nobody took yet stays bounded
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _unreachable(self, name: str, error: Exception) -> UserError:
        return UserError(
            f"cannot read {self.where}/{name} ({type(error).__name__})",
            hint="check the address, the network and your credentials",
        )


def unreachable(*further: type[Exception]) -> tuple[type[Exception], ...]:
    """Return what a place elsewhere raises that does not answer or has no such thing, and ``further``.

    The errors of the hub's client are its own; where there is no network they are no OSError.
    """
    from huggingface_hub.errors import EntryNotFoundError, HTTPError  # type: ignore[attr-defined]

    return OSError, ValueError, EntryNotFoundError, HTTPError, *further


def open_url(url: str) -> tuple[Any, str]:
    """Return the fsspec filesystem of a URL and the path in it.

    Raises: UserError when its kind is unknown or its package is not installed.
    """
    import fsspec

    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UserError(
            f"cannot open {url}: {str(error).splitlines()[0]}",
            hint="hf://, https:// and what fsspec's installed packages know (s3fs for s3://, gcsfs for gs://)",
        ) from None
    return fs, root


def files_of(folder: Path) -> Files:
    """Return where the weights of the target in ``folder`` lie."""
    marker = folder / ELSEWHERE
    if marker.is_file():
        return RemoteFiles(read_json(marker)["url"])
    return LocalFiles(folder)


def is_url(model: str) -> bool:
    return "://" in model
