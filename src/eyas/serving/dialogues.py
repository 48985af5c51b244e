"""Dialogues of benchmarks become prompts, each on the target's own earlier answers."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from eyas.config.schema import EvaluateSettings
from eyas.data.answer_slots import answer_slots
from eyas.data.benchmarks import read_benchmark
from eyas.data.chat import ChatRenderer
from eyas.data.render_error import RenderError
from eyas.engines.base import Prompt, Sampling
from eyas.engines.decoder_base import Decoder
from eyas.errors import UserError
from eyas.serving.results import Group
from eyas.types import Conversation


def benchmark_groups(settings: EvaluateSettings, role_map: Mapping[str, str]) -> Iterator[Group]:
    """Read the benchmarks, their dialogues by suite and category."""
    groups: dict[tuple[str, str], Group] = {}
    for name in settings.benchmarks:
        for prompt in read_benchmark(name, settings.num_prompts, role_map):
            key = prompt.suite, prompt.category
            groups.setdefault(key, Group(*key)).dialogues.append(prompt.conversation)
    yield from groups.values()


def longest_length(
    groups: Sequence[Group], renderer: ChatRenderer, max_new_tokens: int, max_positions: int
) -> int:
    """Return room for the longest prompt with its answer; dialogues grow by an answer a turn."""
    longest = max((len(p.token_ids) for g in groups for p in g.prompts), default=0) + max_new_tokens
    for dialogue in (d for g in groups for d in g.dialogues):
        slots = answer_slots(dialogue)
        with_placeholders = len(renderer.prompt_ids(dialogue, slots[-1]))
        longest = max(longest, with_placeholders + len(slots) * max_new_tokens + 16)
    # A round may look K tokens beyond the limit before they are cut off.
    return min(longest + 16, max_positions)


def answer_turns(
    decoder: Decoder,
    groups: Sequence[Group],
    renderer: ChatRenderer,
    settings: EvaluateSettings,
    max_positions: int,
) -> int:
    """Turn dialogues into prompts, each on the target's greedy answers so far; return how many do not fit."""
    room = max_positions - settings.max_new_tokens
    sampling = Sampling(settings.max_new_tokens)
    left_out = 0
    open_dialogues = [(g, d, 0) for g in groups for d in g.dialogues]
    while open_dialogues:
        asked: list[tuple[Group, Conversation, int, Prompt]] = []
        for group, dialogue, turn in open_dialogues:
            slot = answer_slots(dialogue)[turn]
            prompt_id = f"{group.suite}/{dialogue.conversation_id}/{turn}"
            try:
                prompt = Prompt(prompt_id, tuple(renderer.prompt_ids(dialogue, slot)))
            except RenderError as error:
                raise UserError(f"the chat template refuses {prompt_id}: {error}") from None
            if len(prompt.token_ids) > room:
                left_out += 1
                continue
            group.prompts.append(prompt)
            if turn + 1 < len(answer_slots(dialogue)):
                asked.append((group, dialogue, turn, prompt))
        open_dialogues = []
        if asked:
            served = decoder.answer([p for *_, p in asked], max(settings.concurrency), sampling)
        for group, dialogue, turn, prompt in asked:
            messages = list(dialogue.messages)
            answer = served.answers[prompt.prompt_id]
            messages[answer_slots(dialogue)[turn]] = renderer.message_of(prompt.token_ids, answer.token_ids)
            open_dialogues.append((group, dataclasses.replace(dialogue, messages=tuple(messages)), turn + 1))
    for group in groups:
        group.dialogues = []
    return left_out
