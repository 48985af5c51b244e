"""Turns become samples: contexts that agree are stored once, and samples are cut to a length."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from eyas.types import TokenizedSample


def masked_sample(
    sample_id: str, ids: Sequence[int], spans: Sequence[tuple[int, int]], cut: bool
) -> TokenizedSample | None:
    """Make a sample whose ``spans`` of positions are the assistant's; None when no row is supervised."""
    mask = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        mask[start:end] = True
    if not (cut and mask[-1]) and not (mask[:-1] & mask[1:]).any():
        return None
    return TokenizedSample(sample_id, np.asarray(ids, dtype=np.int32), mask, cut)


def generated_turn(
    sample_id: str, prompt_ids: Sequence[int], answer_ids: Sequence[int], cut: bool
) -> TokenizedSample | None:
    """Join a prompt and what the target generated after it; None when nothing can be learnt from it."""
    if not answer_ids:
        return None
    ids = [*prompt_ids, *answer_ids]
    return masked_sample(sample_id, ids, [(len(prompt_ids), len(ids))], cut)


def merge_turns(turns: Sequence[TokenizedSample]) -> list[TokenizedSample]:
    """Put a turn into the next one's sample where that one begins with exactly its tokens."""
    merged: list[TokenizedSample] = []
    for turn in turns:
        if merged and _is_prefix(merged[-1].input_ids, turn.input_ids):
            mask = turn.loss_mask.copy()
            mask[: len(merged[-1])] |= merged[-1].loss_mask
            merged[-1] = dataclasses.replace(turn, loss_mask=mask)
        else:
            merged.append(turn)
    return merged


def cut_samples(
    conversation_id: str, samples: Sequence[TokenizedSample], max_length: int
) -> list[TokenizedSample]:
    """Name the samples of a conversation, cut them to ``max_length``, leave out what has nothing to learn."""
    kept = []
    for number, sample in enumerate(samples):
        sample_id = conversation_id if len(samples) == 1 else f"{conversation_id}#{number}"
        cut = _cut(dataclasses.replace(sample, sample_id=sample_id), max_length)
        if cut is not None:
            kept.append(cut)
    return kept


def _cut(sample: TokenizedSample, max_length: int) -> TokenizedSample | None:
    if len(sample) <= max_length:
        return sample
    mask = sample.loss_mask
    # No end-of-turn is invented: a sample cut inside an answer says that the answer goes on.
    cut = bool(mask[max_length - 1] and mask[max_length])
    ids, mask = sample.input_ids[:max_length], mask[:max_length]
    if not cut and not (mask[:-1] & mask[1:]).any():
        return None
    return TokenizedSample(sample.sample_id, ids, mask, cut)


def _is_prefix(short: np.ndarray, long: np.ndarray) -> bool:
    return len(short) <= len(long) and bool((long[: len(short)] == short).all())


def mask_ends(sample: TokenizedSample, eos_token_ids: Collection[int]) -> Counter[str]:
    """Count the masked spans of a sample by where they end: ``at`` the end of a turn, one token ``before`` or
    ``behind`` it, or ``elsewhere``; a span that ends with the sample may be cut, and is not counted.

    A mask that somebody else made and shifted by one token looks like any other mask but for this.
    """
    ids, mask = sample.input_ids, sample.loss_mask
    ends = np.flatnonzero(mask[:-1] & ~mask[1:])
    found: Counter[str] = Counter()
    for end in ends.tolist():
        is_end = [bool(ids[i] in eos_token_ids) for i in (max(end - 1, 0), end, end + 1)]
        where = "at" if is_end[1] else "before" if is_end[2] else "behind" if is_end[0] else "elsewhere"
        found[where] += 1
    return found
