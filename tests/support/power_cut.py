"""A disk that forgets: what a power cut would leave is known from the order of writes, syncs and renames."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Disk:
    """Watches ``os.fsync`` and renames below ``root``.

    ``exposed`` names what a rename gave its name before all of it was synced; ``forgotten`` the folders whose
    last rename no sync followed. Both are empty for code that survives a power cut.
    """

    root: Path
    exposed: list[str] = field(default_factory=list)
    renames: list[str] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)
    _synced: dict[int, str] = field(default_factory=dict)  # what of each inode the disk holds
    _open_folders: set[Path] = field(default_factory=set)

    @property
    def forgotten(self) -> list[str]:
        return sorted(str(folder) for folder in self._open_folders if folder.is_dir())

    def holds(self, path: Path) -> bool:
        """Whether the disk has all of a file or folder as it is now."""
        entries = [path, *path.rglob("*")] if path.is_dir() else [path]
        return all(self._synced.get(entry.stat().st_ino) == _content(entry) for entry in entries)

    def on_sync(self, path: Path) -> None:
        self.events.append(("sync", str(path)))
        self._synced[path.stat().st_ino] = _content(path)
        self._open_folders.discard(path)

    def on_rename(self, source: Path, to: Path) -> None:
        self.events.append(("rename", str(to)))
        if not to.name.endswith(".old"):  # on its way out
            self.renames.append(to.name)
            if not self.holds(source):
                self.exposed.append(to.name)
        self._open_folders.add(to.parent)


def _content(path: Path) -> str:
    data = "\n".join(sorted(os.listdir(path))).encode() if path.is_dir() else path.read_bytes()
    return hashlib.sha256(data).hexdigest()


@contextmanager
def watched(root: Path) -> Iterator[Disk]:
    """Watch all that this process does with files below ``root``."""
    disk = Disk(root)
    sync, replace, rename = os.fsync, os.replace, os.rename

    def fsync(fd: int) -> None:
        sync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_relative_to(root):
            disk.on_sync(path)

    def moved(move: Any) -> Any:
        def move_and_tell(source: Any, to: Any, **options: Any) -> None:
            if Path(to).is_relative_to(root):
                disk.on_rename(Path(source), Path(to))
            move(source, to, **options)

        return move_and_tell

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "replace", moved(replace))
        patch.setattr(os, "rename", moved(rename))
        yield disk
