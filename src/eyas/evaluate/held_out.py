"""Held-out prompts: which are decoded, and what the stored states tell of their answers."""

from collections.abc import Sequence

import numpy as np

from eyas.engines.base import Prompt
from eyas.errors import UserError
from eyas.progress import say
from eyas.store.base import StateReader
from eyas.types import TokenizedSample


def choose_samples(
    states: StateReader, num_prompts: int, max_new_tokens: int, eos_token_ids: Sequence[int]
) -> list[int]:
    """Take prompts evenly over the split; an answer must be known as far as it will be decoded.

    Raises: UserError when no answer is.
    """
    known = [
        i for i in range(len(states.lengths)) if _num_known(states.sample(i), eos_token_ids) >= max_new_tokens
    ]
    if not known:
        raise UserError(
            f"every held-out answer is cut before evaluate.max_new_tokens={max_new_tokens} tokens",
            hint="lower it, or raise regenerate.max_new_tokens and data.max_length",
        )
    step = max(1, len(known) // num_prompts)
    return known[::step][:num_prompts]


def prompt_of(sample: TokenizedSample) -> Prompt:
    """Return what comes before the first supervised token."""
    return Prompt(sample.sample_id, tuple(sample.input_ids[: sample.loss_mask.argmax()].tolist()))


def _num_known(sample: TokenizedSample, eos_token_ids: Sequence[int]) -> float:
    """Return how many tokens of the first answer the stored states tell; a finished answer has no more."""
    start = int(sample.loss_mask.argmax())
    answer = first_answer(sample)
    if answer[-1] in eos_token_ids:
        return float("inf")
    # The last state of an answer cut at the sample's end still tells the token after it. One cut by the
    # length limit in an earlier turn is followed by the template's own end of turn, and tells nothing.
    return len(answer) + (sample.cut and start + len(answer) == len(sample))


def first_answer(sample: TokenizedSample) -> tuple[int, ...]:
    """Return the tokens of the first supervised run."""
    start = int(sample.loss_mask.argmax())
    length = int(np.append(~sample.loss_mask[start:], True).argmax())
    return tuple(sample.input_ids[start : start + length].tolist())


def that_fit(prompts: Sequence[Prompt], room: int) -> list[Prompt]:
    """Return the prompts of at most ``room`` tokens, and say how many are longer.

    Raises: UserError when all are.
    """
    fit = [prompt for prompt in prompts if len(prompt.token_ids) <= room]
    num_longer = len(prompts) - len(fit)
    if prompts and not fit:
        raise UserError(
            f"every prompt is longer than {room:,} tokens, the target's context without the answer",
            hint="name shorter prompts, or lower evaluate.max_new_tokens",
        )
    if num_longer:
        say(f"evaluate: left out {num_longer} of {len(prompts)} prompts, longer than {room:,} tokens")
    return fit
