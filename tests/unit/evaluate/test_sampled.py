"""Samples with a draft have the target's distribution, whatever the draft proposes."""

from collections.abc import Sequence

import pytest
import torch

from eyas.evaluate.decode import decode_plain, decode_speculative
from eyas.evaluate.sampled import accept_or_resample, sampler
from eyas.evaluate.two_samples import compare_samples

VOCABULARY = 4


class MarkovSession:
    """A target whose next token depends on the last one alone."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.logits = torch.randn(VOCABULARY, VOCABULARY, generator=generator)
        self.tokens: list[int] = []

    def extend(
        self, token_ids: Sequence[int], num_logits: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.tokens += token_ids
        kept = list(token_ids)[-num_logits:] if num_logits else list(token_ids)
        return self.logits[kept], torch.zeros(len(token_ids), 1, 1)

    def truncate(self, num_tokens: int) -> None:
        del self.tokens[num_tokens:]


class Always:
    """A draft that proposes one token for ever."""

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, aux: torch.Tensor, following: Sequence[int], num_draft_tokens: int) -> list[int]:
        assert len(aux) == len(following)
        return [self.token] * num_draft_tokens


def answers(count: int, token: int | None, seed: int) -> dict[str, list[list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    choose = sampler(0.8, generator)

    def answer() -> list[int]:
        if token is None:
            return decode_plain(MarkovSession(), [0, 1], 4, (), choose).token_ids
        return decode_speculative(MarkovSession(), Always(token), [0, 1], 3, 4, (), choose).token_ids

    return {"p": [answer() for _ in range(count)]}


@pytest.mark.parametrize("token", range(VOCABULARY))
def test_samples_with_any_draft_have_the_targets_distribution(token: int) -> None:
    result = compare_samples(answers(600, None, 1), answers(600, token, 2 + token), 3)
    assert not result.differs
    assert result.detectable <= 0.2


def test_a_draft_token_is_accepted_as_often_as_the_target_gives_it() -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    found = [accept_or_resample(target, 1, generator) for _ in range(4000)]
    assert sum(accepted for _, accepted in found) / 4000 == pytest.approx(0.2, abs=0.02)
    counts = torch.bincount(torch.tensor([token for token, _ in found]), minlength=3) / 4000
    assert torch.allclose(counts.double(), target, atol=0.03)


def test_accepting_every_draft_token_is_found_by_the_test() -> None:
    """What a broken engine does: the control of the test above."""
    always = {"p": [[3, 3, 3, 3]] * 600}
    assert compare_samples(answers(600, None, 1), always, 3).differs


def test_an_answer_ends_at_the_end_of_turn_and_at_its_limit() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        choose = sampler(1.0, generator)
        tokens = decode_speculative(MarkovSession(), Always(2), [0], 3, 6, (2,), choose).token_ids
        assert 2 not in tokens[:-1]
        assert len(tokens) == 6 or tokens[-1] == 2
