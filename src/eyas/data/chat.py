"""From messages to the tokens a server would see, and the mask of what the assistant generated."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from eyas.types import Conversation, TokenizedSample


class RenderError(ValueError):
    """The template refuses a conversation, or renders it in a way that no server would produce."""


class ChatRenderer:
    """Renders with the target's own chat template; masks come from message boundaries, never from text search."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)

    def prompt_ids(self, conversation: Conversation, num_messages: int) -> list[int]:
        """Return the ids a server sees before it generates message number ``num_messages``.

        Raises: RenderError with the template's own words.
        """
        return self._encode(self._render(conversation, num_messages, generation_prompt=True))[0]

    def samples(self, conversation: Conversation, max_length: int) -> list[TokenizedSample]:
        """Tokenize every assistant turn in the context it was generated in.

        Turns whose contexts agree share one sample; a template that renders earlier turns
        differently later on (dropped reasoning, trimmed text) gives one sample for each turn.
        Raises: RenderError when the template refuses the conversation.
        """
        turns = [
            self._turn(conversation, i)
            for i, message in enumerate(conversation.messages)
            if message.role == "assistant" and i > 0
        ]
        return finish_samples(conversation.conversation_id, turns, max_length)

    def _turn(self, conversation: Conversation, index: int) -> TokenizedSample:
        prompt = self._render(conversation, index, generation_prompt=True)
        full = self._render(conversation, index + 1, generation_prompt=False)
        if not full.startswith(prompt):
            raise RenderError("the template renders the answer in another context than its prompt")
        ids, starts = self._encode(full)
        prompt_ids = self._encode(prompt)[0]
        num_prompt = len(prompt_ids)
        # A server tokenizes the prompt alone. Where a token of the full text straddles the boundary
        # the two differ, and the server's view is the true one.
        if ids[:num_prompt] != prompt_ids or (num_prompt < len(ids) and starts[num_prompt] < len(prompt)):
            ids = prompt_ids + self._encode(full[len(prompt) :])[0]
        end = next((i + 1 for i in range(num_prompt, len(ids)) if ids[i] in self.eos_token_ids), len(ids))
        return _masked(conversation.conversation_id, ids[:end], num_prompt, cut=False)

    def _render(self, conversation: Conversation, num_messages: int, generation_prompt: bool) -> str:
        messages = conversation.for_template()[:num_messages]
        tools: Any = [dict(tool) for tool in conversation.tools] or None
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RenderError(f"the template refuses it: {error}") from None

    def _encode(self, text: str) -> tuple[list[int], list[int]]:
        """Return ids and the character each token starts at; the template has put in any BOS itself."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), [start for start, _ in encoded["offset_mapping"]]


def generated_turn(
    sample_id: str, prompt_ids: Sequence[int], answer_ids: Sequence[int], cut: bool
) -> TokenizedSample | None:
    """Join a prompt and what the target generated after it; None when the answer holds no token."""
    ids = [*prompt_ids, *answer_ids]
    if len(answer_ids) + cut < 2:
        return None
    return _masked(sample_id, ids, len(prompt_ids), cut)


def finish_samples(
    conversation_id: str, turns: Sequence[TokenizedSample], max_length: int
) -> list[TokenizedSample]:
    """Merge turns whose contexts agree, cut to ``max_length``, drop what has nothing left to learn."""
    merged: list[TokenizedSample] = []
    for turn in turns:
        if merged and _is_prefix(merged[-1].input_ids, turn.input_ids):
            mask = turn.loss_mask.copy()
            mask[: len(merged[-1])] |= merged[-1].loss_mask
            merged[-1] = dataclasses.replace(turn, loss_mask=mask)
        else:
            merged.append(turn)
    kept = []
    for number, sample in enumerate(merged):
        sample_id = conversation_id if len(merged) == 1 else f"{conversation_id}#{number}"
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


def _masked(sample_id: str, ids: Sequence[int], num_prompt: int, cut: bool) -> TokenizedSample:
    mask = np.zeros(len(ids), dtype=bool)
    mask[num_prompt:] = True
    if len(ids) - num_prompt + cut < 2:
        raise RenderError("the answer is empty")
    return TokenizedSample(sample_id, np.asarray(ids, dtype=np.int32), mask, cut)


def _is_prefix(short: np.ndarray, long: np.ndarray) -> bool:
    return len(short) <= len(long) and bool((long[: len(short)] == short).all())
