import numpy as np
import pytest

from eyas.data.pack import pack
from eyas.files import fingerprint


@pytest.mark.parametrize("seed", range(5))
def test_packing_places_every_document_once_within_the_budget(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 60, 300).tolist()
    groups = pack(lengths, 100, seed)
    assert sorted(i for g in groups for i in g) == list(range(300))
    assert max(sum(lengths[i] for i in g) for g in groups) <= 100
    # The waste of a budget is small, or packing has no point.
    assert len(groups) <= 1.1 * sum(lengths) / 100 + 1


def test_a_document_longer_than_the_budget_is_alone() -> None:
    groups = pack([500, 10, 10], 100, 0)
    assert [0] in groups


def test_packing_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 100).tolist()
    assert pack(lengths, 100, 3) == pack(lengths, 100, 3)
    assert pack(lengths, 100, 3) != pack(lengths, 100, 4)
    assert pack([], 100, 0) == []


def test_batches_of_a_seed_are_what_they_were() -> None:
    """Training resumes in the batches it began with, also under a later version."""
    lengths = np.random.default_rng(7).integers(3, 30, 80).tolist()
    groups = pack(lengths, 64, seed=5)
    assert sorted(i for group in groups for i in group) == list(range(80))
    assert (len(groups), groups[:3], fingerprint(groups)) == PINNED


PINNED = (22, [[34, 20, 28], [15, 64], [68, 5, 63]], "ae3455739d34fd09")
