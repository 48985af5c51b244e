"""The draft vocabulary: the target ids that the assistant uses most."""

from collections.abc import Iterable, Sequence

import numpy as np

from eyas.types import TokenizedSample, VocabMap


def count_supervised(samples: Iterable[TokenizedSample], vocab_size: int) -> np.ndarray:
    """Count how often the assistant wrote each target id: int64 [V]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        counts += np.bincount(sample.input_ids[sample.loss_mask], minlength=vocab_size)
    return counts


def build_vocab_map(counts: np.ndarray, size: int | None, always: Sequence[int]) -> VocabMap:
    """Choose ``size`` ids: those in ``always`` (end-of-turn), then by count, ties and fill-up by id.

    Shapes: counts [V]. ``size`` None, or one that the target's vocabulary does not exceed, keeps all of it.
    """
    vocab_size = len(counts)
    if size is None or size >= vocab_size:
        return VocabMap(np.arange(vocab_size), vocab_size)
    ranked = counts.astype(np.int64, copy=True)
    ranked[list(always)] = np.iinfo(np.int64).max
    chosen = np.argsort(-ranked, kind="stable")[:size]
    return VocabMap(np.sort(chosen), vocab_size)


def coverage(counts: np.ndarray, vocab: VocabMap) -> float:
    """Return the share of supervised tokens that the draft vocabulary holds."""
    return float(counts[vocab.target_ids].sum() / max(1, counts.sum()))
