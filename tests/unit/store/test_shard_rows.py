"""A shard whose tensors do not belong together is refused, though its checksum is the one written."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from test_shards import SPEC, shard_file, states_of, write_store

from eyas.errors import ContractError
from eyas.safetensors_io import checksum_of_file
from eyas.store.journal import append_record, read_journal
from eyas.store.shard_reader import OpenShard
from eyas.store.shards import ShardStore


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    write_store(tmp_path, states_of(12))
    return shard_file(tmp_path)


def rewrite(path: Path, facts: dict[str, Any] | None = None, **changes: torch.Tensor | None) -> None:
    """Write the shard again with other tensors or facts in it."""
    with safe_open(path, framework="pt") as f:
        tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
        known = json.loads(f.metadata()["eyas"])
    tensors |= {name: value for name, value in changes.items() if value is not None}
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, path, {"eyas": json.dumps(known | (facts or {}))})


def tensor_of(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as f:
        return f.get_tensor(name)


def test_the_shard_as_it_was_written_is_read(shard: Path) -> None:
    rewrite(shard)
    assert OpenShard(shard, torch.float32).read(0).aux.shape[1:] == (3, 16)


@pytest.mark.parametrize("name", ["aux", "last"])
@pytest.mark.parametrize("by", [-1, 1])
def test_more_or_fewer_rows_of_states_than_tokens_are_refused(shard: Path, name: str, by: int) -> None:
    states = tensor_of(shard, name)
    rewrite(shard, **{name: states[:-1] if by < 0 else torch.cat([states, states[-1:]])})
    with pytest.raises(ContractError, match=r"rows of aux and last states for \d+ tokens"):
        OpenShard(shard, torch.float32)


def test_a_mask_of_other_tokens_is_refused(shard: Path) -> None:
    mask = tensor_of(shard, "loss_mask")
    rewrite(shard, loss_mask=torch.ones_like(mask))
    with pytest.raises(ContractError, match="rows of aux and last states"):
        OpenShard(shard, torch.float32)


def test_another_format_version_is_refused(shard: Path) -> None:
    rewrite(shard, {"format_version": 99})
    with pytest.raises(ContractError, match="shard format 99, this eyas reads"):
        OpenShard(shard, torch.float32)


def journaled_again(folder: Path, shard: Path) -> None:
    """Let the journal say what the file is now."""

    record = read_journal(folder)[1]
    append_record(
        folder,
        replace(record, attempt=2, num_bytes=shard.stat().st_size, checksum=checksum_of_file(shard)),
    )


def test_a_shard_of_another_target_is_refused(tmp_path: Path, shard: Path) -> None:
    rewrite(shard, {"target": "another"})
    journaled_again(tmp_path, shard)
    with pytest.raises(ContractError, match="holds states of another target"):
        ShardStore(tmp_path).verify(1)


def test_a_shard_of_fewer_samples_than_journaled_is_refused(tmp_path: Path, shard: Path) -> None:

    record = read_journal(tmp_path)[1]
    append_record(tmp_path, replace(record, attempt=2, num_samples=record.num_samples + 1))
    with pytest.raises(ContractError, match=f"holds {record.num_samples} samples"):
        ShardStore(tmp_path).verify(1)


@pytest.mark.parametrize("by", [-1, 1])
def test_a_shard_of_another_size_is_refused_before_it_is_read(tmp_path: Path, shard: Path, by: int) -> None:
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] if by < 0 else data + b"\0")
    with pytest.raises(ContractError, match=f"{len(data) + by} bytes, {len(data)} were written"):
        ShardStore(tmp_path).verify(1)


def test_a_flipped_bit_is_noticed_when_its_shard_is_first_read(tmp_path: Path, shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1  # of a state
    shard.write_bytes(data)
    store = ShardStore(tmp_path)
    first = store.records[0].num_samples
    store.read(0)
    with pytest.raises(ContractError, match="its checksum is not the one written"):
        store.read(first)
    with pytest.raises(ContractError, match="its checksum is not the one written"):
        list(store.shard(1))


def test_a_spec_is_what_the_manifest_says(tmp_path: Path, shard: Path) -> None:
    assert ShardStore(tmp_path).spec == SPEC
