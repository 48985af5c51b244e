"""The files of a target, by byte range: in a folder, or where the folder says that its weights lie."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eyas.errors import UserError
from eyas.files import read_json

# In a folder that describes a target without holding its weights: {"url": where they lie}.
ELSEWHERE = "weights_elsewhere.json"


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


class RemoteFiles:
    """A model folder behind an fsspec URL: hf://owner/name@revision, s3://, gs://, https://."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._fs, self._root = open_url(self._url)

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
        try:
            return int(self._fs.size(self._path(name)))
        except FileNotFoundError:
            return None
        except unreachable(TypeError) as error:
            raise self._unreachable(name, error) from None

    def read(self, name: str, start: int, stop: int) -> bytearray:
        try:
            return bytearray(self._fs.cat_file(self._path(name), start=start, end=stop))
        except unreachable() as error:
            raise self._unreachable(name, error) from None

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
