"""How sure an acceptance length is, by resampling prompts.

Rounds of one answer are alike, so prompts are drawn with replacement, not rounds; the percentiles of the
lengths of these draws bound the interval.

Source: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from eyas.drafters.common.acceptance import Acceptance

LEVEL = 0.95
_NUM_DRAWS = 4000
# Fewer prompts say nothing of how prompts differ.
_FEWEST = 3

Interval = tuple[float, float]


def length_interval(prompts: Sequence[Acceptance]) -> Interval | None:
    """Return the interval of the acceptance length of all prompts; None for fewer than three.

    Units: tokens per target forward.
    """
    counts = _counts(prompts)
    if len(counts) < _FEWEST:
        return None
    return _bounds(_lengths(counts, np.random.default_rng(0)))


def difference_interval(before: Mapping[str, Acceptance], after: Mapping[str, Acceptance]) -> Interval | None:
    """Return the interval of how much longer ``after`` is than ``before``, both by prompt; None for too few.

    Where both measured the same prompts, these are drawn together, which leaves out how prompts differ.
    """
    generator = np.random.default_rng(0)
    if before.keys() == after.keys():
        names = [name for name in sorted(before) if before[name].num_rounds and after[name].num_rounds]
        if len(names) < _FEWEST:
            return None
        pairs = np.stack([_counts([part[name] for name in names]) for part in (before, after)], axis=1)
        drawn = pairs[_draws(len(pairs), generator)].sum(1)  # (draws, 2, rounds and tokens)
        return _bounds(drawn[:, 1, 1] / drawn[:, 1, 0] - drawn[:, 0, 1] / drawn[:, 0, 0])
    parts = [_counts(list(part.values())) for part in (before, after)]
    if min(map(len, parts)) < _FEWEST:
        return None
    lengths = [_lengths(part, generator) for part in parts]
    return _bounds(lengths[1] - lengths[0])


def _counts(prompts: Sequence[Acceptance]) -> np.ndarray:
    """Return rounds and accepted draft tokens of the prompts that had a round, [n, 2]."""
    pairs = [(p.num_rounds, sum(p.accepted_at)) for p in prompts if p.num_rounds]
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)


def _lengths(counts: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    drawn = counts[_draws(len(counts), generator)].sum(1)
    return np.asarray(1 + drawn[:, 1] / drawn[:, 0])


def _draws(num: int, generator: np.random.Generator) -> np.ndarray:
    return generator.integers(0, num, (_NUM_DRAWS, num))


def _bounds(values: np.ndarray) -> Interval:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
