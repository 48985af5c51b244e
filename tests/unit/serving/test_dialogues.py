"""Dialogues become prompts, each on the answers that the target gave before."""

from collections.abc import Sequence

import pytest

from eyas.config.schema import EvaluateSettings
from eyas.data.chat import ChatRenderer
from eyas.engines.base import Prompt, Sampling
from eyas.engines.decoder_base import Served
from eyas.serving.dialogues import answer_turns, longest_length
from eyas.serving.results import Group
from eyas.types import Completion, Conversation, Message
from tiny import make_tokenizer

SETTINGS = EvaluateSettings(max_new_tokens=8)


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    tokenizer = make_tokenizer()
    return ChatRenderer(tokenizer, (tokenizer.eos_token_id,))


class Decoder:
    """Answers every prompt with the text ``fox``."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.ids = (*renderer.tokenizer.encode("fox"), *renderer.eos_token_ids)

    def answer(self, prompts: Sequence[Prompt], concurrency: int, sampling: Sampling) -> Served:
        return Served({p.prompt_id: Completion(p.prompt_id, self.ids, "stop") for p in prompts})


def group() -> Group:
    turns = [Message("user", "the dog"), Message("assistant", "as written"), Message("user", "and then?")]
    return Group("s", "a", dialogues=[Conversation("d", tuple(turns), "bench")])


def test_a_later_turn_follows_the_answer_that_was_given(renderer: ChatRenderer) -> None:
    asked = group()
    assert answer_turns(Decoder(renderer), [asked], renderer, SETTINGS, 500) == 0  # type: ignore[arg-type]
    assert [p.prompt_id for p in asked.prompts] == ["s/d/0", "s/d/1"]
    second = renderer.tokenizer.decode(asked.prompts[1].token_ids)
    assert "fox" in second
    assert "as written" not in second
    assert asked.dialogues == []


def test_turns_that_do_not_fit_are_counted(renderer: ChatRenderer) -> None:
    first = group()
    answer_turns(Decoder(renderer), [first], renderer, SETTINGS, 500)  # type: ignore[arg-type]
    room = len(first.prompts[1].token_ids) + SETTINGS.max_new_tokens - 1
    asked = group()
    assert answer_turns(Decoder(renderer), [asked], renderer, SETTINGS, room) == 1  # type: ignore[arg-type]
    assert len(asked.prompts) == 1


def test_there_is_room_for_the_longest_prompt_and_all_answers(renderer: ChatRenderer) -> None:
    asked = group()
    room = longest_length([asked], renderer, SETTINGS.max_new_tokens, 10_000)
    answer_turns(Decoder(renderer), [asked], renderer, SETTINGS, 10_000)  # type: ignore[arg-type]
    assert room >= max(len(p.token_ids) for p in asked.prompts) + SETTINGS.max_new_tokens
    assert longest_length([asked], renderer, SETTINGS.max_new_tokens, 20) == 20
