"""Do two sets of sampled answers come from one distribution? A permutation test on their first tokens.

Above temperature 0 no answer has to be another's, so the draft's effect shows in distributions only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.errors import ContractError

# Answers to each prompt, and their tokens: what a wrong acceptance rule changes shows in the first ones.
NUM_SAMPLES, NUM_TOKENS = 48, 3
_PERMUTATIONS = 2000
_LEVEL = 0.001  # false alarms: one in a thousand evaluations
_POWER = 0.9


@dataclass(frozen=True)
class TwoSampleResult:
    """``p_value`` of equal distributions; ``detectable`` is the total variation distance that samples of this
    size show with a probability of nine in ten, were it the same for every prompt and position."""

    num_samples: int  # of each set
    p_value: float
    detectable: float
    differs: bool  # at a level of one false alarm in a thousand


def compare_samples(
    one: Mapping[str, Sequence[Sequence[int]]],
    other: Mapping[str, Sequence[Sequence[int]]],
    num_tokens: int,
    seed: int = 0,
) -> TwoSampleResult:
    """Compare answers sampled to the same prompts, by prompt; ``num_tokens`` of each answer count.

    The statistic adds up, over prompts and prefix lengths, the squared differences of how often each prefix
    occurs. Answers are exchanged between the sets within their prompt, so prompts may differ as they like.
    Raises: ValueError when the sets answer other prompts, or a prompt unequally often.
    """
    if one.keys() != other.keys() or any(len(one[name]) != len(other[name]) for name in one):
        raise ValueError("both sets must answer the same prompts equally often")
    rng = np.random.default_rng(seed)
    groups = [_labels([*one[name], *other[name]], num_tokens) for name in one]
    observed = sum(_statistic(labels, np.arange(labels.shape[1])) for labels in groups)
    permuted = np.zeros(_PERMUTATIONS)
    for labels in groups:
        for i in range(_PERMUTATIONS):
            permuted[i] += _statistic(labels, rng.permutation(labels.shape[1]))
    # The observed order is one of the orders, so that p is never 0.
    p_value = (1 + int((permuted >= observed * (1 - 1e-12)).sum())) / (_PERMUTATIONS + 1)
    threshold = float(np.quantile(permuted, 1 - _LEVEL))
    detectable = detectable_distance(groups, threshold, rng)
    return TwoSampleResult(sum(map(len, one.values())), p_value, detectable, p_value < _LEVEL)


def sampling_row(
    num_draft_tokens: int,
    temperature: float,
    drafted: Mapping[str, Sequence[Sequence[int]]],
    alone: Mapping[str, Sequence[Sequence[int]]],
) -> dict[str, Any]:
    """Compare samples with the draft and of the target alone, as a row of a report."""
    result = compare_samples(drafted, alone, NUM_TOKENS)
    return {"num_draft_tokens": num_draft_tokens, "temperature": temperature, **vars(result)}


def broken_by_sampling(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the contracts that sampled answers contradict."""
    return [
        f"sampling: at temperature {row['temperature']:g} answers with K = {row['num_draft_tokens']} have "
        f"another distribution than the target's (p = {row['p_value']:.1g} for {row['num_samples']} answers)"
        for row in rows
        if row["differs"]
    ]


def check_sampled(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises: ContractError where sampled answers have another distribution than the target's."""
    if broken := broken_by_sampling(rows):
        raise ContractError(broken[0], hint="evaluation/report.json says what the test could have found")


def detectable_distance(groups: Sequence[np.ndarray], threshold: float, rng: np.random.Generator) -> float:
    """Return the smallest distance found with nine trials in ten when that share of one set's answers is
    replaced by an answer that nobody else gives. Below one step of the grid, the step.

    ``threshold`` is the statistic that is beyond chance."""
    grid = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
    for share in grid:
        if np.mean([_shifted(groups, share, rng) > threshold for _ in range(50)]) >= _POWER:
            return share
    return 1.0


def _labels(answers: Sequence[Sequence[int]], num_tokens: int) -> np.ndarray:
    """Number the prefixes [num_tokens, 2n] of a prompt's answers: equal numbers are equal prefixes."""
    rows = []
    for length in range(1, num_tokens + 1):
        prefixes = [tuple(answer[:length]) for answer in answers]
        numbers = {prefix: i for i, prefix in enumerate(dict.fromkeys(prefixes))}
        rows.append([numbers[prefix] for prefix in prefixes])
    return np.array(rows)


def _statistic(labels: np.ndarray, order: np.ndarray) -> float:
    half = labels.shape[1] // 2
    total = 0.0
    for row in labels:
        size = int(row.max()) + 1
        first, second = row[order[:half]], row[order[half:]]
        difference = np.bincount(first, minlength=size) - np.bincount(second, minlength=size)
        total += float(np.square(difference).sum())
    return total


def _shifted(groups: Sequence[np.ndarray], share: float, rng: np.random.Generator) -> float:
    """Return the statistic of exchanged sets after a share of the second one's answers became another."""
    total = 0.0
    for labels in groups:
        size = labels.shape[1]
        mixed = labels[:, rng.permutation(size)].copy()
        changed = size // 2 + np.flatnonzero(rng.random(size - size // 2) < share)
        mixed[:, changed] = labels.max() + 1
        total += _statistic(mixed, np.arange(size))
    return total
