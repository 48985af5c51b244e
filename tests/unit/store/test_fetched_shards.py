"""Shards behind a URL are fetched once, and fetched again after what was damaged has been repaired."""

from pathlib import Path

import pytest
import torch
from test_shards import states_of, write_store

from eyas.errors import ContractError
from eyas.store.shards import ShardStore
from eyas.store.storage import RemoteFolder, folder_of

NAME = "shard-00001.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}"


def damage(folder: object, where: str = "a state") -> bytes:
    """Flip a bit of a remote shard and return what it was."""
    assert isinstance(folder, RemoteFolder)
    data = folder.read(NAME)
    at = {"a header": 20, "a state": len(data) // 2, "a mask": len(data) - 8}[where]
    folder.write(NAME, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    return data


@pytest.mark.parametrize("where", ["a header", "a state", "a mask"])
def test_a_damaged_shard_is_fetched_again_once_its_remote_copy_is_repaired(root: str, where: str) -> None:
    states = states_of(12)
    write_store(root, states)  # type: ignore[arg-type]
    whole = damage(folder_of(root), where)
    store = ShardStore(root)
    index = store.records[0].num_samples
    for _ in range(2):
        with pytest.raises(ContractError, match="is damaged"):
            store.read(index)
    folder_of(root).write(NAME, whole)
    assert torch.equal(store.read(index).aux, states[index].aux)


@pytest.mark.parametrize("where", ["a header", "a state", "a mask"])
def test_a_damaged_shard_does_not_stay_in_the_cache(root: str, where: str) -> None:
    write_store(root, states_of(12))  # type: ignore[arg-type]
    damage(folder_of(root), where)
    store = ShardStore(root)
    with pytest.raises(ContractError, match="is damaged"):
        store.verify(1)
    assert isinstance(store.folder, RemoteFolder)
    assert store.folder._cache is not None
    assert not (store.folder._cache / NAME).exists()


def test_a_whole_shard_is_fetched_once(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_store(root, states_of(12))  # type: ignore[arg-type]
    store = ShardStore(root)
    assert isinstance(store.folder, RemoteFolder)
    fetched: list[str] = []
    get = store.folder.fs.get_file
    monkeypatch.setattr(
        store.folder.fs, "get_file", lambda source, to: (fetched.append(source), get(source, to))
    )
    for _ in range(3):
        store.verify(1)
    assert len(fetched) == 1


def test_a_local_store_keeps_its_damaged_shard(tmp_path: Path) -> None:
    """Its file is the only copy."""
    write_store(tmp_path, states_of(12))
    path = tmp_path / NAME
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ContractError, match="is damaged"):
        ShardStore(tmp_path).verify(1)
    assert path.is_file()
