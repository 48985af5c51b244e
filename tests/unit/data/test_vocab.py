import numpy as np

from eyas.data.vocab import build_vocab_map, count_supervised, coverage
from eyas.types import TokenizedSample


def test_counts_are_of_what_the_assistant_wrote() -> None:
    sample = TokenizedSample("s", np.array([4, 4, 2, 2, 3], np.int32), np.array([0, 0, 1, 1, 1], bool))
    assert count_supervised([sample], 6).tolist() == [0, 0, 2, 1, 0, 0]


def test_the_draft_vocabulary_takes_end_of_turn_first_then_the_most_used() -> None:
    vocab = build_vocab_map(np.array([0, 5, 9, 5, 1, 0]), 3, always=[0])
    assert vocab.target_ids.tolist() == [0, 1, 2]
    assert build_vocab_map(np.array([0, 5, 9, 5, 1, 0]), 3, always=[]).target_ids.tolist() == [1, 2, 3]


def test_a_vocabulary_as_large_as_the_targets_is_the_targets() -> None:
    for size in (None, 6, 100):
        assert build_vocab_map(np.zeros(6, np.int64), size, [1]).is_full


def test_coverage_is_the_share_of_tokens_that_the_draft_can_say() -> None:
    counts = np.array([1, 6, 3])
    assert coverage(counts, build_vocab_map(counts, 1, [])) == 0.6
    assert coverage(counts, build_vocab_map(counts, 3, [])) == 1.0
