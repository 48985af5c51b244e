"""The two-sample test finds another distribution and leaves the same one alone."""

import numpy as np
import pytest

from eyas.evaluate.two_samples import compare_samples


def draw(rng: np.random.Generator, weights: list[float], count: int) -> list[list[int]]:
    return [list(row) for row in rng.choice(len(weights), (count, 2), p=weights)]


def test_two_sets_of_one_distribution_rarely_differ() -> None:
    rng = np.random.default_rng(1)
    p_values = []
    for _ in range(20):
        one = {str(i): draw(rng, [0.5, 0.3, 0.2], 30) for i in range(3)}
        other = {str(i): draw(rng, [0.5, 0.3, 0.2], 30) for i in range(3)}
        p_values.append(compare_samples(one, other, 2).p_value)
    assert min(p_values) > 0.001
    assert np.mean(np.array(p_values) < 0.5) == pytest.approx(0.5, abs=0.3)


def test_another_distribution_is_found() -> None:
    rng = np.random.default_rng(2)
    one = {str(i): draw(rng, [0.6, 0.2, 0.2], 80) for i in range(3)}
    other = {str(i): draw(rng, [0.2, 0.2, 0.6], 80) for i in range(3)}
    result = compare_samples(one, other, 1)
    assert result.differs
    assert result.num_samples == 240


def test_a_difference_behind_the_first_token_is_found() -> None:
    rng = np.random.default_rng(3)
    first = rng.choice(2, 200)
    one = {"p": [[int(t), 0] for t in first]}
    other = {"p": [[int(t), 1] for t in rng.permutation(first)]}
    assert not compare_samples(one, other, 1).differs
    assert compare_samples(one, other, 2).differs


def test_more_samples_detect_smaller_distances() -> None:
    rng = np.random.default_rng(4)
    few = {"p": draw(rng, [0.5, 0.5], 20)}
    many = {"p": draw(rng, [0.5, 0.5], 400)}
    assert compare_samples(many, many, 1).detectable < compare_samples(few, few, 1).detectable


def test_sets_of_other_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="same prompts"):
        compare_samples({"a": [[1]]}, {"b": [[1]]}, 1)
