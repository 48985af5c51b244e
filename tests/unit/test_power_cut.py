"""What a power cut leaves: a name stands for whole content, and what was reported as done stays."""

from pathlib import Path

import pytest

from eyas.data.prepared import PreparedWriter
from eyas.files import atomic_file, atomic_folder, write_json
from eyas.store.journal import ShardRecord, append_record, repair_journal
from eyas.store.shards import ShardWriter
from eyas.store.storage import LocalFolder
from fault_cases import one_sample_store
from power_cut import Disk, watched


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path.resolve()


def assert_safe(disk: Disk) -> None:
    assert disk.renames
    assert disk.exposed == []
    assert disk.forgotten == []


def test_a_file_is_on_the_disk_before_it_has_its_name(root: Path) -> None:
    with watched(root) as disk, atomic_file(root / "a.txt") as beside:
        beside.write_text("whole")
    assert disk.exposed == []
    assert disk.holds(root / "a.txt")


def test_the_name_of_a_file_is_on_the_disk_at_the_end(root: Path) -> None:
    with watched(root) as disk, atomic_file(root / "a.txt") as beside:
        beside.write_text("whole")
    assert disk.forgotten == []
    assert disk.events[-1] == ("sync", str(root))


def test_all_files_of_a_folder_are_on_the_disk_before_it_has_its_name(root: Path) -> None:
    with watched(root) as disk, atomic_folder(root / "f") as beside:
        (beside / "a").write_text("one")
        (beside / "sub").mkdir()
        (beside / "sub" / "b").write_text("two")
    assert disk.exposed == []
    assert disk.holds(root / "f" / "a")
    assert disk.holds(root / "f" / "sub" / "b")


def test_the_entries_of_a_folder_are_on_the_disk_before_it_has_its_name(root: Path) -> None:
    with watched(root) as disk, atomic_folder(root / "f") as beside:
        (beside / "sub").mkdir()
        (beside / "sub" / "b").write_text("two")
    assert disk.holds(root / "f")


def test_the_name_of_a_folder_is_on_the_disk_at_the_end(root: Path) -> None:
    (root / "f").mkdir()
    with watched(root) as disk, atomic_folder(root / "f") as beside:
        (beside / "a").write_text("new")
    assert disk.forgotten == []


def test_json_is_written_so_that_a_power_cut_leaves_the_old_or_the_new(root: Path) -> None:
    with watched(root) as disk:
        write_json(root / "a.json", {"a": 1})
        write_json(root / "a.json", {"a": 2})
    assert_safe(disk)


def test_a_line_of_a_journal_is_on_the_disk_when_it_is_added(root: Path) -> None:
    folder = LocalFolder(root)
    with watched(root) as disk:
        folder.append_line("journal.jsonl", 0, b"one")
        assert disk.holds(root / "journal.jsonl")
        folder.append_line("journal.jsonl", 1, b"two")
        assert disk.holds(root / "journal.jsonl")


@pytest.mark.parametrize("how", ["write", "put"])
def test_a_file_of_a_store_is_on_the_disk_before_it_has_its_name(root: Path, how: str) -> None:
    folder = LocalFolder(root)
    with watched(root) as disk:
        if how == "write":
            folder.write("manifest.json", b"{}")
        else:
            with folder.put("shard") as beside:
                beside.write_bytes(b"states")
    assert_safe(disk)


def test_a_shard_is_on_the_disk_before_the_journal_names_it(root: Path) -> None:
    states, manifest = one_sample_store()
    with watched(root) as disk:
        writer = ShardWriter(root, manifest)
        writer.write(0, states)
    assert_safe(disk)
    synced = [Path(path).name for event, path in disk.events if event == "sync"]
    folder = len(synced) - 1 - synced[::-1].index(root.name)
    assert synced[-1] == "journal.jsonl"
    assert folder == len(synced) - 2, "the folder's entry of the shard comes right before the line"
    assert disk.holds(root / "journal.jsonl")


def test_a_repaired_journal_is_on_the_disk_before_it_has_its_name(root: Path) -> None:
    append_record(root, ShardRecord(0, 1, 1, 1, "c"))
    with (root / "journal.jsonl").open("ab") as f:
        f.write(b"torn")
    with watched(root) as disk:
        repair_journal(root)
    assert disk.renames == ["journal.jsonl"]
    assert_safe(disk)


def test_prepared_data_are_on_the_disk_before_their_manifest_has_its_name(root: Path) -> None:
    with watched(root) as disk:
        (root / "prepared").mkdir()
        with PreparedWriter(root / "prepared", 300) as writer:
            writer.finish(tokenizer_fingerprint="t", template_fingerprint="t")
        renamed = [path for event, path in disk.events if event == "rename"]
        assert [Path(p).name for p in renamed] == ["manifest.json"]
        before = disk.events[: disk.events.index(("rename", renamed[0]))]
        synced = {Path(path).name for _, path in before}
        assert synced >= {"samples.parquet", "conversations.parquet", "drops.jsonl"}
        for name in ("samples.parquet", "conversations.parquet", "drops.jsonl"):
            assert disk.holds(root / "prepared" / name)
    assert_safe(disk)
