"""What a worker hands over is whole and verified, or it is an error with the worker's reason."""

import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from eyas.engines.vllm import state_transfer as staging
from eyas.engines.vllm.state_transfer import (
    StagedStates,
    layer_digests,
    make_spare,
    take_digests,
    take_states,
    write_digests,
    write_error,
    write_states,
)
from eyas.errors import ContractError

GO_ON = threading.Event()


def staged(dtype: torch.dtype = torch.bfloat16) -> StagedStates:
    return StagedStates.split(torch.randn(7, 3, 8).to(dtype), torch.arange(7), (2, 4, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_come_back_bit_for_bit_and_their_file_is_gone(tmp_path: Path, dtype: torch.dtype) -> None:
    written = staged(dtype)
    write_states(tmp_path / "a", written)
    found = take_states(tmp_path / "a", 1, GO_ON)
    assert torch.equal(found.lower, written.lower)
    assert torch.equal(found.last, written.last)
    assert found.lower.dtype == found.last.dtype == dtype
    assert torch.equal(found.token_ids, written.token_ids)
    assert found.layer_ids == (2, 4, 6)
    assert list(tmp_path.iterdir()) == []


def test_any_safetensors_reader_reads_a_staged_file(tmp_path: Path) -> None:
    written = staged()
    write_states(tmp_path / "a", written)
    with safe_open(tmp_path / "a", framework="pt") as f:
        assert torch.equal(f.get_tensor("lower"), written.lower)
        assert torch.equal(f.get_tensor("last"), written.last)


@pytest.fixture
def spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(staging, "_MIN_SPARE", 500)
    make_spare(tmp_path)
    return tmp_path / "spare"


def test_a_file_is_written_over_once_nobody_holds_its_states_and_not_before(
    tmp_path: Path, spare: Path
) -> None:
    first, second, third = staged(), staged(), StagedStates.split(torch.randn(3, 3, 8), torch.arange(3), (1,))
    write_states(tmp_path / "a", first)
    found = take_states(tmp_path / "a", 1, GO_ON)
    row, file = found.lower[2], (tmp_path / "a").stat().st_ino
    del found
    gc.collect()
    write_states(tmp_path / "b", second)
    assert (tmp_path / "b").stat().st_ino != file
    assert torch.equal(row, first.lower[2])
    del row
    gc.collect()
    assert [f.name for f in spare.iterdir()] == ["a"]
    write_states(tmp_path / "c", third)  # shorter than what the file held
    assert (tmp_path / "c").stat().st_ino == file
    assert list(spare.iterdir()) == []
    found = take_states(tmp_path / "c", 1, GO_ON)
    assert torch.equal(found.states, third.states)


def test_a_small_file_is_not_worth_it(tmp_path: Path) -> None:
    make_spare(tmp_path)
    write_states(tmp_path / "a", staged())
    assert take_states(tmp_path / "a", 1, GO_ON).lower.any()
    assert not (tmp_path / "a").exists()
    assert list((tmp_path / "spare").iterdir()) == []


def test_states_that_are_held_for_any_time_never_change(tmp_path: Path, spare: Path) -> None:
    held: list[tuple[StagedStates, torch.Tensor]] = []
    names, turn = iter(range(10**6)), threading.Lock()

    def hand_over(seed: int) -> None:
        made = torch.randn(seed % 50 + 1, 3, 64, generator=torch.Generator().manual_seed(seed))
        path = tmp_path / str(next(names))
        write_states(path, StagedStates.split(made, torch.arange(len(made)), (1, 2, 3)))
        with turn:
            held.append((take_states(path, 10, GO_ON), made))
            found, made = held.pop(random.randrange(len(held))) if len(held) > 20 else held[0]
        assert torch.equal(found.states, made)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(hand_over, seed) for seed in range(600)]:
            done.result()
    assert len(list(tmp_path.rglob("*"))) < 60  # of 600


@pytest.mark.parametrize("place", [-1, -40, 600])
def test_a_flipped_bit_is_found(tmp_path: Path, place: int) -> None:
    write_states(tmp_path / "a", StagedStates.split(torch.randn(40, 3, 8), torch.arange(40), (1, 2, 3)))
    data = bytearray((tmp_path / "a").read_bytes())
    data[place] ^= 1
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(ContractError, match="damaged"):
        take_states(tmp_path / "a", 1, GO_ON)


def test_a_truncated_file_is_found(tmp_path: Path) -> None:
    write_states(tmp_path / "a", staged())
    data = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(data[:-5])
    with pytest.raises(ContractError, match="damaged"):
        take_states(tmp_path / "a", 1, GO_ON)


def test_a_failed_write_arrives_as_its_reason(tmp_path: Path) -> None:
    write_error(tmp_path / "a", "OSError: No space left on device")
    with pytest.raises(ContractError, match="No space left on device"):
        take_states(tmp_path / "a", 10, GO_ON)


def test_a_file_that_never_comes_is_an_error_in_time(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="wrote no a within"):
        take_states(tmp_path / "a", 0.05, GO_ON)


def test_waiting_ends_when_it_is_told_to(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(ContractError, match="nobody waits for a any more"):
        take_states(tmp_path / "a", 100, stop)


def test_checksums_tell_layers_apart(tmp_path: Path) -> None:
    states = torch.randn(5, 3, 8)
    other = states.clone()
    other[4, 1, 7] += 1
    one, two = layer_digests(states), layer_digests(other)
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, False, True]
    write_digests(tmp_path / "a", 3, one)
    assert take_digests(tmp_path / "a", 3, 1, GO_ON) == one
