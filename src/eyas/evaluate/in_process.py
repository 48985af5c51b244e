"""Held-out prompts decoded in this process, with the draft and without."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eyas.drafters.common.acceptance import Acceptance
from eyas.engines.base import Prompt
from eyas.evaluate.decode import Decoded, decode_plain, decode_speculative
from eyas.evaluate.lossless import FirstDifference, first_difference, num_compared
from eyas.evaluate.near_ties import rounding_report
from eyas.evaluate.sampled import sampler
from eyas.evaluate.two_samples import NUM_SAMPLES, NUM_TOKENS, sampling_row
from eyas.progress import Progress

_NUM_PROMPTS = 4  # of which samples are taken: this decoder runs one sequence at a time


@dataclass(frozen=True)
class Here:
    """What was decoded in this process, by prompt."""

    plain: dict[str, Decoded]
    drafted: dict[str, Decoded]
    differences: list[FirstDifference]
    sampled: tuple[dict[str, Any], ...] = ()  # of each temperature, how samples compare

    def rounding(self) -> dict[str, Any]:
        """Return how often the answers part, as ``near_ties.rounding_report``."""
        parted = {d.prompt_id: d for d in self.differences}
        tokens = sum(num_compared(parted.get(name), p.token_ids) for name, p in self.plain.items())
        return rounding_report(len(parted), tokens, [d.gap for d in self.differences], [])


def decode_here(
    engine: Any,
    new_proposer: Callable[[], Any],
    prompts: Sequence[Prompt],
    num_draft_tokens: int,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
) -> Here:
    """Decode every prompt with and without the draft; ``engine`` opens a ``TargetSession`` for each."""
    here, acceptance = Here({}, {}, []), Acceptance.empty(num_draft_tokens)
    with Progress("evaluate", len(prompts), "prompts") as progress:
        for prompt in prompts:
            ids = list(prompt.token_ids)
            plain = decode_plain(engine.session(), ids, max_new_tokens, eos_token_ids)
            drafted = decode_speculative(
                engine.session(), new_proposer(), ids, num_draft_tokens, max_new_tokens, eos_token_ids
            )
            here.plain[prompt.prompt_id], here.drafted[prompt.prompt_id] = plain, drafted
            difference = first_difference(
                prompt.prompt_id, plain.token_ids, drafted.token_ids, plain.likeliest
            )
            if difference:
                here.differences.append(difference)
            assert drafted.acceptance is not None
            acceptance += drafted.acceptance
            progress.advance(1, f"acceptance length {acceptance.length:.2f}")
    return here


def sample_here(
    engine: Any,
    new_proposer: Callable[[], Any],
    prompts: Sequence[Prompt],
    num_draft_tokens: int,
    temperature: float,
    seed: int,
    eos_token_ids: Sequence[int],
) -> dict[str, Any]:
    """Sample short answers to the first prompts, with the draft and without, and compare the two sets."""
    choose = sampler(temperature, torch.Generator().manual_seed(seed))
    plain: dict[str, list[list[int]]] = {}
    drafted: dict[str, list[list[int]]] = {}
    with Progress("evaluate", len(prompts[:_NUM_PROMPTS]), "sampled prompts") as progress:
        for prompt in prompts[:_NUM_PROMPTS]:
            ids = list(prompt.token_ids)
            plain[prompt.prompt_id] = [
                decode_plain(engine.session(), ids, NUM_TOKENS, eos_token_ids, choose).token_ids
                for _ in range(NUM_SAMPLES)
            ]
            drafted[prompt.prompt_id] = [
                decode_speculative(
                    engine.session(), new_proposer(), ids, num_draft_tokens, NUM_TOKENS, eos_token_ids, choose
                ).token_ids
                for _ in range(NUM_SAMPLES)
            ]
            progress.advance(1)
    return sampling_row(num_draft_tokens, temperature, drafted, plain)
