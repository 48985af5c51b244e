"""A conversation as far as the target has answered it."""

import dataclasses
from collections.abc import Sequence

from eyas.data.answer_slots import answer_slots
from eyas.data.chat import ChatRenderer
from eyas.data.prepared import PreparedWriter, Split
from eyas.data.render_error import RenderError
from eyas.data.samples import cut_samples, generated_turn, merge_turns
from eyas.data.sources import Drop
from eyas.engines.base import Prompt
from eyas.types import Completion, Conversation, TokenizedSample


@dataclasses.dataclass
class Dialogue:
    """``slots`` are the messages that the target answers, of which ``num_answered`` are answered.

    ``trouble`` says why no further turn is answered.
    """

    split: Split
    conversation: Conversation
    slots: list[int]
    turns: list[TokenizedSample] = dataclasses.field(default_factory=list)
    num_answered: int = 0
    trouble: str | None = None

    @classmethod
    def of(cls, split: Split, conversation: Conversation) -> "Dialogue":
        return cls(split, conversation, answer_slots(conversation))

    @property
    def is_open(self) -> bool:
        return self.trouble is None and self.num_answered < len(self.slots)

    @property
    def prompt_id(self) -> str:
        return f"{self.conversation.conversation_id}:{self.num_answered}"

    def prompt(self, renderer: ChatRenderer, max_length: int) -> Prompt | None:
        """Return the prompt of the next answer; None with ``trouble`` where it cannot be asked."""
        try:
            ids = renderer.prompt_ids(self.conversation, self.slots[self.num_answered])
        except RenderError as error:
            self.trouble = str(error)
            return None
        if len(ids) >= max_length:
            self.trouble = "prompt_too_long"
            return None
        return Prompt(self.prompt_id, tuple(ids))

    def take(self, prompt: Prompt, answer: Completion, renderer: ChatRenderer) -> None:
        """Put an answer into the conversation's history and keep its tokens for training."""
        conversation, slot = self.conversation, self.slots[self.num_answered]
        # No end-of-turn is invented: an answer that met the length limit is marked as continuing.
        cut = answer.finish_reason == "length"
        turn = generated_turn(conversation.conversation_id, prompt.token_ids, answer.token_ids, cut)
        if turn is not None:
            self.turns.append(turn)
        messages = list(conversation.messages)
        messages[slot : slot + 1] = [renderer.message_of(prompt.token_ids, answer.token_ids, cut)]
        self.conversation = dataclasses.replace(conversation, messages=tuple(messages))
        self.num_answered += 1


def write_dialogues(writer: PreparedWriter, dialogues: Sequence[Dialogue], max_length: int) -> None:
    """Write the samples of what was answered; a dialogue without any is dropped with its reason."""
    for dialogue in dialogues:
        conversation = dialogue.conversation
        samples = cut_samples(conversation.conversation_id, merge_turns(dialogue.turns), max_length)
        if not samples:
            reason = dialogue.trouble or "empty_answer"
            writer.drop(Drop(conversation.conversation_id, conversation.source, reason))
            continue
        if dialogue.trouble:
            # What was answered before the trouble is sound; the rest is another model's and is left out.
            writer.counts["stopped_early_conversations"] += 1
            answered = conversation.messages[: dialogue.slots[dialogue.num_answered]]
            conversation = dataclasses.replace(conversation, messages=answered)
        writer.counts[f"{dialogue.split}_conversations"] += 1
        for sample in samples:
            writer.add_sample(dialogue.split, sample)
        writer.add_conversation(dialogue.split, conversation)
