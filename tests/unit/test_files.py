from pathlib import Path

import pytest

from eyas.files import atomic_file, atomic_folder, fingerprint, read_json, sha256_of_file, write_json


class Crash(RuntimeError):
    pass


def crash(path: Path) -> None:
    path.write_text("half")
    raise Crash


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_file_is_not_there_until_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    with atomic_file(path) as beside:
        beside.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    assert names(path.parent) == ["a.txt"]


def test_a_crash_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(Crash), atomic_file(path) as beside:
        crash(beside)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_folder_replaces_the_old_one_whole(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "stale").write_text("x")
    with atomic_folder(folder) as beside:
        (beside / "sub").mkdir()
        (beside / "sub" / "new").write_text("y")
        assert names(folder) == ["stale"]
    assert names(folder) == ["sub"]
    assert names(tmp_path) == ["f"]


def test_a_crash_leaves_the_old_folder_and_no_litter(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "old").write_text("x")
    with pytest.raises(Crash), atomic_folder(folder) as beside:
        crash(beside / "half")
    assert names(folder) == ["old"]
    assert names(tmp_path) == ["f"]


def test_json_comes_back_as_it_was(tmp_path: Path) -> None:
    value = {"text": "Grüße \u2028", "numbers": [1, 2.5, None], "nested": {"a": True}}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value


def test_fingerprints_ignore_the_order_of_keys_and_see_every_value() -> None:
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})
    assert fingerprint([[1], [2]]) != fingerprint([[1, 2]])
    assert len(fingerprint(None)) == 16


def test_the_checksum_is_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_of_file(tmp_path / "a").startswith("ba7816bf8f01cfea")
