"""The draft vocabulary: the target ids that the assistant uses most."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from eyas.errors import UserError
from eyas.types import TokenizedSample, VocabMap

COVERAGE_SIZES = (8192, 16384, 32768, 65536)
_TOKENS_PER_COUNT = 1 << 20


def count_supervised(samples: Iterable[TokenizedSample], vocab_size: int) -> np.ndarray:
    """Count how often the assistant wrote each target id: int64 [V]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for ids in _joined(sample.input_ids[sample.loss_mask] for sample in samples):
        counts += np.bincount(ids, minlength=vocab_size)
    return counts


def _joined(parts: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Join arrays until they are worth a pass over the whole vocabulary."""
    waiting: list[np.ndarray] = []
    size = 0
    for part in parts:
        waiting.append(part)
        size += len(part)
        if size >= _TOKENS_PER_COUNT:
            yield np.concatenate(waiting)
            waiting, size = [], 0
    if waiting:
        yield np.concatenate(waiting)


def build_vocab_map(counts: np.ndarray, size: int | None, always: Sequence[int]) -> VocabMap:
    """Choose ``size`` ids: those in ``always`` (end-of-turn), then by count, ties and fill-up by id.

    Shapes: counts [V]. ``size`` None, or one that the target's vocabulary does not exceed, keeps all of it.
    Raises: UserError when ``size`` cannot even hold ``always``.
    """
    vocab_size = len(counts)
    if size is None or size >= vocab_size:
        return VocabMap(np.arange(vocab_size), vocab_size)
    if size < len(set(always)):
        raise UserError(
            f"draft.vocab_size={size} is smaller than the {len(set(always))} tokens it must hold",
            hint="raise draft.vocab_size",
        )
    ranked = counts.astype(np.int64, copy=True)
    ranked[list(always)] = np.iinfo(np.int64).max
    chosen = np.argsort(-ranked, kind="stable")[:size]
    return VocabMap(np.sort(chosen), vocab_size)


def always_kept(counts: np.ndarray, eos_token_ids: Sequence[int], special_ids: Iterable[int]) -> list[int]:
    """Return the ids that a draft vocabulary must hold: end-of-turn, and special tokens however rare."""
    return sorted({*eos_token_ids, *(i for i in special_ids if i < len(counts) and counts[i])})


def coverage(counts: np.ndarray, vocab: VocabMap) -> float:
    """Return the share of supervised tokens that the draft vocabulary holds."""
    return float(counts[vocab.target_ids].sum() / max(1, counts.sum()))


def coverage_at(counts: np.ndarray, sizes: Iterable[int]) -> dict[str, float]:
    """Return the share of supervised tokens that the most frequent ids cover, by draft vocabulary size."""
    total = np.sort(counts)[::-1].cumsum()
    return {str(size): float(total[min(size, len(total)) - 1] / max(1, total[-1])) for size in sizes}
