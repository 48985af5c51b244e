"""What is exactly full is not split, and one more is."""

from pathlib import Path

import numpy as np
import pytest

from eyas.data.pack import pack
from eyas.engines.fake.engine import FakeEngine
from eyas.errors import ContractError
from eyas.store.manifest import StoreManifest, plan_shards, stored_bytes_per_token
from eyas.store.window_store import bytes_of, plan_windows
from eyas.types import HiddenStates
from tiny import make_spec, random_samples

ONE_RANK = [[[[0]]], [[[1]]], [[[2]]], [[[3]]]]


@pytest.mark.parametrize(
    ("window", "bounds"),
    [
        (10, [(0, 4)]),
        (9, [(0, 3), (3, 4)]),
        (6, [(0, 3), (3, 4)]),
        (5, [(0, 2), (2, 3), (3, 4)]),
        (3, [(0, 2), (2, 3), (3, 4)]),
        (2, [(0, 1), (1, 2), (2, 3), (3, 4)]),
    ],
)
def test_a_window_that_is_exactly_full_is_not_split(window: int, bounds: list[tuple[int, int]]) -> None:
    assert plan_windows(ONE_RANK, [1, 2, 3, 4], window) == bounds


def test_the_largest_share_of_the_ranks_decides() -> None:
    steps = [[[[0]], [[1]]], [[[2]], [[3]]]]
    assert plan_windows(steps, [1, 2, 3, 4], 6) == [(0, 2)]
    assert plan_windows(steps, [1, 2, 3, 4], 5) == [(0, 1), (1, 2)]
    assert plan_windows(steps, [2, 1, 4, 3], 5) == [(0, 1), (1, 2)]


def test_an_epoch_ends_a_window_that_has_room() -> None:
    assert plan_windows([*ONE_RANK, *ONE_RANK], [1, 1, 1, 1], 100) == [(0, 4), (4, 8)]


def test_the_bytes_of_a_sample_are_those_of_its_states() -> None:
    for dtype in ("float32", "bfloat16"):
        spec = make_spec(dtype=dtype)
        for states in FakeEngine(None, spec).capture(random_samples(5, spec.vocab_size)):
            assert isinstance(states, HiddenStates)
            assert bytes_of(states.sample, spec) == states.aux.nbytes + states.last.nbytes


def test_a_shard_that_is_exactly_full_is_not_split() -> None:
    # Behind the first shard so much is left that the limit is the shard's own size.
    lengths = [10, 10, *[5] * 80]
    assert plan_shards(lengths, 2, 40)[:2] == (0, 2)
    assert plan_shards(lengths, 2, 39)[:2] == (0, 1)
    assert plan_shards([10, 10], 2, 40) == (0, 2)


def test_all_states_that_fit_in_one_shard_are_in_one() -> None:
    assert plan_shards([5] * 4, 2, 40) == (0, 4)
    assert len(plan_shards([5] * 4, 2, 39)) > 2


def test_states_in_8_bits_take_their_values_and_a_scale_for_each_layer() -> None:
    spec = make_spec()
    assert stored_bytes_per_token(spec, "auto") == (3 + 1) * 16 * 4
    assert stored_bytes_per_token(spec, "float8_e4m3fn") == (3 + 1) * (16 + 4)


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_that_is_exactly_full_takes_no_more_and_one_with_room_does(seed: int) -> None:
    assert sorted(map(len, pack([4, 4, 4, 4], 8, seed))) == [2, 2]
    assert sorted(map(len, pack([4, 4, 4, 4], 9, seed))) == [2, 2]
    assert sorted(map(len, pack([4, 4, 4, 4], 7, seed))) == [1, 1, 1, 1]
    assert sorted(map(len, pack([9, 4, 4], 8, seed))) == [1, 2], "a longer one has a batch to itself"


def test_the_fullest_batch_with_room_is_taken() -> None:
    """Best fit: of two open batches the one with less room takes what fits in both."""
    for seed in range(20):
        lengths = [6, 3, 2]
        order = np.random.default_rng(seed).permutation(3).tolist()
        groups = pack(lengths, 8, seed)
        assert all(sum(lengths[i] for i in group) <= 8 for group in groups)
        if order[:2] in ([0, 1], [1, 0]):
            assert sorted(map(sorted, groups)) == [[0, 2], [1]]


@pytest.mark.parametrize("bounds", [(), (1, 4), (0, 5, 3)])
def test_a_manifest_whose_shards_do_not_follow_each_other_is_damaged(
    tmp_path: Path, bounds: tuple[int, ...]
) -> None:
    StoreManifest(make_spec(), "data", bounds).write(tmp_path)
    with pytest.raises(ContractError, match="its shards do not follow each other"):
        StoreManifest.read(tmp_path)


def test_a_manifest_comes_back_as_it_was(tmp_path: Path) -> None:
    manifest = StoreManifest(make_spec(), "data", (0, 2, 2, 5), "float8_e4m3fn")
    manifest.write(tmp_path)
    assert StoreManifest.read(tmp_path) == manifest
    assert manifest.num_shards == 3
