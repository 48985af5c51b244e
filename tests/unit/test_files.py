from pathlib import Path

import pytest

from eyas.errors import ContractError
from eyas.files import (
    atomic_file,
    atomic_folder,
    fingerprint,
    read_json,
    refusing_damaged,
    seal,
    sha256_of_file,
    unseal,
    write_json,
)


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


def test_what_was_sealed_comes_back_and_no_changed_value_is_believed() -> None:
    sealed = seal({"a": 1, "nested": {"b": [1.5, None]}})
    assert unseal(sealed) == {"a": 1, "nested": {"b": [1.5, None]}}
    with pytest.raises(ValueError, match="its checksum is not the one written"):
        unseal({**sealed, "a": 2})


@pytest.mark.parametrize("value", [[1], "text", {"a": 1}, {"a": 1, "seal": 7}])
def test_what_has_no_seal_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="it has no checksum of itself"):
        unseal(value)


def test_another_format_version_is_told_from_damage() -> None:
    sealed = seal({"format_version": 3})
    assert unseal(sealed, 3) == {"format_version": 3}
    with (
        pytest.raises(ContractError, match="x has format version 3, this eyas reads 4"),
        refusing_damaged("x", "h"),
    ):
        unseal(sealed, 4)
    with (
        pytest.raises(ContractError, match="x is damaged: its checksum") as caught,
        refusing_damaged("x", "h"),
    ):
        unseal({**sealed, "seal": "0"}, 3)
    assert caught.value.hint == "h"


def test_a_folder_is_made_in_folders_that_do_not_exist_yet(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "a" / "b" / "f") as beside:
        (beside / "x").write_text("y")
    assert (tmp_path / "a" / "b" / "f" / "x").read_text() == "y"
