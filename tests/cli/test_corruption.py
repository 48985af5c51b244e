"""A file that is not what was written is named, and its content made again or refused: never believed."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from eyas.errors import ContractError
from eyas.files import seal, unseal
from eyas.safetensors_io import checksum_of_file
from eyas.store.journal import append_record, read_journal
from eyas.store.manifest import StoreManifest
from eyas.store.shards import ShardStore
from faults import contents
from pipeline import eyas, write_run

STAGES = ["prepare", "regenerate", "extract", "train", "export", "evaluate"]


@dataclass(frozen=True)
class Finished:
    run_file: Path
    copy: Path

    @property
    def run(self) -> Path:
        return self.run_file.parent / "run"


@pytest.fixture(scope="module")
def done(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    run_file = write_run(folder, tiny_target)
    for stage in STAGES[:-1]:
        assert eyas(stage, "-c", run_file).code == 0
    shutil.copytree(folder / "run", folder / "copy")
    return Finished(run_file, folder / "copy")


@pytest.fixture
def finished(done: Finished) -> Finished:
    shutil.rmtree(done.run)
    shutil.copytree(done.copy, done.run)
    return done


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def other_version(path: Path) -> None:
    """Only what describes itself has a version."""
    value = unseal(json.loads(path.read_text()))
    path.write_text(json.dumps(seal(value | {"format_version": 99})))


def missing(path: Path) -> None:
    path.unlink()


# file: who reads it, how its loss is mended: the command, and files to delete before it
FILES: dict[str, tuple[str, str, bool]] = {
    "prepared/manifest.json": ("regenerate", "prepare", False),
    "prepared/conversations.parquet": ("regenerate", "prepare", False),
    "regenerated/manifest.json": ("extract", "regenerate", False),
    "regenerated/samples.parquet": ("extract", "regenerate", False),
    "states/train/manifest.json": ("train", "extract", True),
    "states/train/journal.jsonl": ("train", "extract", False),
    "states/train/shard-00001.safetensors": ("train", "extract", True),
    "states/held_out/shard-00000.safetensors": ("train", "extract", True),
    "draft/model.safetensors": ("evaluate", "export", False),
    "draft/config.json": ("evaluate", "export", False),
}
# Every damage for the store, which is where the hours are; for the others a change and a loss.
CASES = [
    (name, damage)
    for name in FILES
    for damage in ([truncate, empty, flip, missing] if "states/train" in name else [flip, missing])
]
SELF_DESCRIBING = ["prepared/manifest.json", "regenerated/manifest.json", "states/train/manifest.json"]
CASES += [(name, other_version) for name in SELF_DESCRIBING]


@pytest.mark.parametrize(("name", "damage"), CASES, ids=[f"{d.__name__} {n}" for n, d in CASES])
def test_a_damaged_file_is_named_and_made_again(
    finished: Finished, name: str, damage: Callable[[Path], None]
) -> None:
    reader, mender, must_be_deleted = FILES[name]
    path = finished.run / name
    damage(path)
    # The reader has not done its work yet, so that it reads.
    folder = {"regenerate": "regenerated", "extract": "states", "train": "checkpoints", "evaluate": "none"}
    shutil.rmtree(finished.run / folder[reader], ignore_errors=True)
    refused = eyas(reader, "-c", finished.run_file)
    assert refused.code in (1, 2), refused.err
    named = path.name in refused.err or path.parent.name in refused.err
    assert named, refused.err
    assert "should not happen" not in refused.err
    if must_be_deleted:
        assert "delete" in refused.err or damage in (missing, other_version)
        path.unlink(missing_ok=True)
    mended = eyas(mender, "-c", finished.run_file)
    assert mended.code == 0, mended.err
    found, wanted = contents(finished.run), contents(finished.copy)
    part = name.partition("/")[0]
    differing = [n for n in wanted if n.startswith(part) and found.get(n) != wanted[n]]
    # A shard that was written again is journalled again.
    assert [n for n in differing if not n.endswith("journal.jsonl")] == []
    assert eyas(reader, "-c", finished.run_file).code == 0


@pytest.mark.parametrize("damage", [flip, other_version], ids=lambda d: d.__name__)
def test_a_damaged_checkpoint_is_named_and_training_makes_it_again(
    finished: Finished, damage: Callable[[Path], None]
) -> None:
    best = json.loads((finished.run / "checkpoints" / "best.json").read_text())["step"]
    folder = finished.run / "checkpoints" / f"step-{best:06d}"
    damage(folder / "checkpoint.json")
    shutil.rmtree(finished.run / "draft")
    refused = eyas("export", "-c", finished.run_file)
    assert refused.code == 1
    assert folder.name in refused.err
    shutil.rmtree(folder)
    assert eyas("train", "-c", finished.run_file).code == 0
    found, wanted = contents(finished.run), contents(finished.copy)
    assert [n for n in wanted if n.startswith("checkpoints") and found.get(n) != wanted[n]] == []


@pytest.mark.parametrize("stage", ["prepare", "extract", "train", "export"])
@pytest.mark.parametrize("damage", [truncate, flip], ids=lambda d: d.__name__)
def test_a_damaged_record_is_refused(finished: Finished, stage: str, damage: Callable[[Path], None]) -> None:
    folder = {"prepare": "prepared", "extract": "states", "train": "checkpoints", "export": "draft"}[stage]
    damage(finished.run / folder / "stage.json")
    refused = eyas(stage, "-c", finished.run_file)
    assert refused.code == 1
    assert "stage.json is damaged" in refused.err
    assert "--fresh" in refused.err


def test_a_shard_of_another_target_is_refused(finished: Finished) -> None:
    """Its checksum is journalled too, as if another run had written into this folder."""
    store = finished.run / "states" / "train"
    path = store / "shard-00001.safetensors"
    fingerprint = StoreManifest.read(store).spec.fingerprint.encode()
    data = path.read_bytes()
    assert fingerprint in data
    path.write_bytes(data.replace(fingerprint, fingerprint[::-1]))
    record = dataclasses.replace(read_journal(store)[1], checksum=checksum_of_file(path), attempt=2)
    append_record(store, record)
    shutil.rmtree(finished.run / "checkpoints")
    refused = eyas("train", "-c", finished.run_file)
    assert refused.code == 1
    assert "holds other states" in refused.err
    with pytest.raises(ContractError, match=r"shard-00001\.safetensors holds states of another target"):
        ShardStore(store).verify(1)
