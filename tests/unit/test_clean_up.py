"""What killed processes left is removed by the next one, whatever it is and wherever it is nested."""

import os
import shutil
from pathlib import Path

import pytest

from eyas.files import atomic_file, atomic_folder, remove_folder, remove_litter
from eyas.locks import hold
from eyas.store.storage import LocalFolder

TMP, OLD = "step-000005.743516c3.tmp", "step-000004.743516c3.old"


def everything(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    return path


@pytest.mark.parametrize("name", [TMP, OLD])
@pytest.mark.parametrize("inside", [".checkpoint.json.63f45389.tmp", "a/.b.63f45389.tmp/.c.63f45389.tmp"])
def test_a_temporary_file_inside_a_temporary_folder_is_removed_with_it(
    tmp_path: Path, name: str, inside: str
) -> None:
    write(tmp_path / "checkpoints" / f".{name}" / inside)
    write(tmp_path / "checkpoints" / "best.json")
    remove_litter(tmp_path)
    assert everything(tmp_path) == ["checkpoints", "checkpoints/best.json"]


def test_temporary_files_at_any_depth_are_removed(tmp_path: Path) -> None:
    write(tmp_path / ".run.yaml.63f45389.tmp")
    write(tmp_path / "states" / "train" / ".shard-00001.safetensors.63f45389.tmp")
    kept = write(tmp_path / "states" / "train" / "shard-00000.safetensors")
    remove_litter(tmp_path)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [kept]


@pytest.mark.parametrize(
    "name", [".hidden", "a.63f45389.tmp", ".a.63f4538.tmp", ".a.63f45389.tmp.json", ".63f45389.tmp", ".lock"]
)
def test_files_with_other_names_are_kept(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    remove_litter(tmp_path)
    assert (tmp_path / name).is_file()


def test_a_folder_that_does_not_exist_has_no_litter(tmp_path: Path) -> None:
    remove_litter(tmp_path / "nothing")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("number", range(6))
def test_what_any_interruption_of_a_write_leaves_is_litter(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is left of a file and a folder that a kill interrupts has a name that the next run removes."""
    (tmp_path / "f").mkdir()
    write(tmp_path / "f" / "old")
    calls = 0

    def count(name: str) -> None:
        original = getattr(os, name)

        def call(*arguments: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls > number:
                raise Killed
            return original(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("replace", "fsync", "unlink", "rename"):
        count(name)
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed), atomic_folder(tmp_path / "f") as beside, atomic_file(beside / "a") as inner:
        inner.write_text("new")
    monkeypatch.undo()
    remove_litter(tmp_path)
    left = everything(tmp_path)
    # Between the two renames the old folder has gone and the new one has not come: it is written again then.
    assert left in ([], ["f", "f/old"], ["f", "f/a"])


def test_a_folder_is_removed_whole_or_has_a_name_that_counts_as_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "step-000001" / "checkpoint.json")
    write(tmp_path / "step-000001" / "draft.safetensors")

    def killed(path: Path) -> None:
        (path / "draft.safetensors").unlink()
        raise Killed

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Killed):
        remove_folder(tmp_path / "step-000001")
    monkeypatch.undo()
    assert not (tmp_path / "step-000001").exists()
    remove_litter(tmp_path)
    assert everything(tmp_path) == []


def test_the_writer_of_a_store_elsewhere_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    write(tmp_path / "train" / ".shard-00001.safetensors.63f45389.tmp")
    write(tmp_path / ".train.63f45389.old" / "journal.jsonl")
    with LocalFolder(tmp_path).lock():
        assert everything(tmp_path) == [".lock", "train"]
    assert everything(tmp_path) == ["train"]


def test_the_second_writer_of_a_store_removes_nothing(tmp_path: Path) -> None:
    from eyas.errors import UserError

    being_written = write(tmp_path / "train" / ".shard-00001.safetensors.63f45389.tmp")
    with hold(tmp_path / ".lock", "states"), pytest.raises(UserError), LocalFolder(tmp_path).lock():
        pass
    assert being_written.is_file()


def test_a_store_that_is_being_cleared_is_gone_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal without its manifest would be believed by the next writer."""
    write(tmp_path / "train" / "manifest.json")
    write(tmp_path / "train" / "journal.jsonl")

    def killed(path: Path, **options: object) -> None:
        (path / "manifest.json").unlink()
        raise Killed

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Killed):
        LocalFolder(tmp_path / "train").clear()
    assert not (tmp_path / "train").exists()
