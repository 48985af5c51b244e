"""States that a stream keeps: whole or not, of these samples, in this order."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.capture import stream_cache
from eyas.capture.stream_cache import StreamCache
from eyas.capture.windows import Unit
from eyas.engines.fake.engine import FakeEngine
from eyas.errors import ContractError, UserError
from eyas.store.storage import folder_of
from eyas.train.ranks import Ranks
from eyas.types import TargetSpec, TokenizedSample
from tiny import make_spec, random_samples

SPEC = make_spec()
SAMPLES = random_samples(5, SPEC.vocab_size)
UNITS = [Unit(0, 0, (3, 0)), Unit(1, 0, (1, 4, 2))]


def cache_at(
    folder: Path,
    samples: Sequence[TokenizedSample] = SAMPLES,
    units: Sequence[Unit] = UNITS,
    spec: TargetSpec = SPEC,
    fresh: bool = False,
    data: str = "data",
) -> StreamCache:
    return StreamCache(folder_of(folder), spec, Ranks(), samples, data, units, fresh)


def states_of(unit: Unit) -> list[Any]:
    return list(FakeEngine(None, SPEC).capture(SAMPLES[i] for i in unit.samples))


def keep(cache: StreamCache, *units: Unit) -> None:
    for unit in units:
        cache.keep(unit, states_of(unit), None)


def test_what_was_kept_is_whole_when_its_last_unit_is_there(tmp_path: Path) -> None:
    cache = cache_at(tmp_path)
    assert cache.whole is None
    assert cache.will_be_whole(UNITS)
    assert not cache.will_be_whole(UNITS[:1])
    keep(cache, UNITS[0])
    assert cache.will_be_whole(UNITS[1:])
    keep(cache, UNITS[1])
    (expected,) = FakeEngine(None, SPEC).capture(SAMPLES[4:])
    assert torch.equal(cache.read(SAMPLES[4]).aux, expected.aux)  # type: ignore[union-attr]


def test_a_later_run_reads_whole_states_whatever_its_order(tmp_path: Path) -> None:
    keep(cache_at(tmp_path), *UNITS)
    later = cache_at(tmp_path, units=[Unit(0, 0, (0, 1, 2, 3, 4))], data="of another run").whole
    assert later is not None
    assert list(later.lengths) == [len(s) for s in SAMPLES]
    assert later.sample(2) is SAMPLES[2]
    (expected,) = FakeEngine(None, SPEC).capture(SAMPLES[2:3])
    assert torch.equal(later.read(2).last, expected.last)  # type: ignore[union-attr]


def test_states_kept_in_part_are_of_one_order_and_fresh_deletes_them(tmp_path: Path) -> None:
    keep(cache_at(tmp_path), UNITS[0])
    other = [Unit(0, 0, (0, 1, 2, 3, 4))]
    with pytest.raises(UserError, match="keeps some of the states, in the order of another training"):
        cache_at(tmp_path, units=other)
    assert cache_at(tmp_path, units=other, fresh=True).will_be_whole(other)


def test_an_interrupted_stream_keeps_only_what_is_missing(tmp_path: Path) -> None:
    keep(cache_at(tmp_path), UNITS[0])
    again = cache_at(tmp_path)
    assert again.will_be_whole(UNITS[1:])
    shards = tmp_path / stream_cache.FOLDER
    before = (shards / "shard-00000.safetensors").stat().st_mtime_ns
    keep(again, *UNITS)
    assert (shards / "shard-00000.safetensors").stat().st_mtime_ns == before


def test_whole_states_of_another_target_or_of_other_samples_are_refused(tmp_path: Path) -> None:
    keep(cache_at(tmp_path), *UNITS)
    with pytest.raises(UserError, match="keeps the states of another target"):
        cache_at(tmp_path, spec=make_spec(weights_fingerprint="others"))
    with pytest.raises(UserError, match="keeps the states of other samples"):
        cache_at(tmp_path, [*SAMPLES[:4], dataclasses.replace(SAMPLES[4], sample_id="new")])


def test_other_tokens_under_a_known_id_are_refused_when_they_are_read(tmp_path: Path) -> None:
    keep(cache_at(tmp_path), *UNITS)
    changed = dataclasses.replace(SAMPLES[1], input_ids=SAMPLES[1].input_ids[::-1].copy())
    whole = cache_at(tmp_path, [SAMPLES[0], changed, *SAMPLES[2:]]).whole
    assert whole is not None
    with pytest.raises(ContractError, match="keeps other tokens under the id sample-1"):
        whole.read(1)


def test_a_store_that_never_becomes_whole_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_cache, "_SHOWN_WITHIN_S", -1.0)
    cache = cache_at(tmp_path)
    keep(cache, UNITS[0])
    with pytest.raises(ContractError, match="does not show all that the ranks have written"):
        cache.read(SAMPLES[0])
