"""Only prompts whose answers are known as far as they are decoded are chosen."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eyas.engines.base import Prompt
from eyas.errors import UserError
from eyas.evaluate.held_out import choose_samples, first_answer, prompt_of, that_fit
from eyas.types import TokenizedSample

EOS = 0


def sample(name: str, answer: list[int], then: tuple[int, ...] = (), cut: bool = False) -> TokenizedSample:
    ids = [5, 6, 7, *answer, *then]
    mask = [False] * 3 + [True] * len(answer) + [False] * len(then)
    return TokenizedSample(name, np.array(ids, np.int32), np.array(mask), cut)


def store(*samples: TokenizedSample) -> Any:
    return SimpleNamespace(lengths=[len(s) for s in samples], sample=lambda index: samples[index])


def test_a_prompt_ends_where_the_first_answer_begins() -> None:
    found = sample("s", [8, 9, EOS], then=(5,))
    assert (prompt_of(found).token_ids, first_answer(found)) == ((5, 6, 7), (8, 9, EOS))


def test_an_answer_is_known_if_it_ends_or_is_long_enough() -> None:
    states = store(
        sample("ends", [8, EOS]),
        sample("too short", [8, 9], then=(4,)),
        sample("long enough", [8, 9, 10], then=(4,)),
        sample("cut, and its last state tells one more", [8, 9], cut=True),
    )
    assert choose_samples(states, 10, 3, [EOS]) == [0, 2, 3]


def test_prompts_are_taken_evenly() -> None:
    states = store(*(sample(str(i), [8, EOS]) for i in range(10)))
    assert choose_samples(states, 3, 4, [EOS]) == [0, 3, 6]


def test_answers_that_are_all_cut_earlier_are_refused() -> None:
    with pytest.raises(UserError, match=r"is cut before evaluate\.max_new_tokens=9 tokens"):
        choose_samples(store(sample("s", [8, 9], then=(4,))), 1, 9, [EOS])


def test_prompts_beyond_the_targets_context_are_left_out_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = [Prompt(name, (5,) * length) for name, length in (("a", 8), ("b", 9), ("c", 7))]
    with caplog.at_level("INFO"):
        assert [p.prompt_id for p in that_fit(prompts, 8)] == ["a", "c"]
    assert "left out 1 of 3 prompts, longer than 8 tokens" in caplog.text
    with pytest.raises(UserError, match="every prompt is longer than 6 tokens"):
        that_fit(prompts, 6)
    assert that_fit([], 6) == []
