"""From messages to the tokens a server would see, and the mask of what the assistant generated."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from eyas.data.encode import Encoder, Turn
from eyas.data.reasoning import OPENED_THINKING, split_reasoning
from eyas.data.records import Record, RenderedText, TokenRow
from eyas.data.render_error import RenderError
from eyas.data.samples import cut_samples, merge_turns
from eyas.data.tool_forms import PROBE, ToolForms
from eyas.types import Conversation, Message, TokenizedSample

# Tokens at a prompt's end in which its opening of the reasoning is looked for.
_LOOK_BACK = 8
# What a template can run into, which is anybody's program.
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A record's samples, and how many supervised tokens the length limit cost."""

    samples: list[TokenizedSample]
    num_cut_tokens: int


class ChatRenderer:
    """Renders with the target's own chat template; masks come from message boundaries, not text search."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int],
        template_kwargs: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.template_kwargs = dict(template_kwargs or {})
        self.vocab_size = vocab_size or len(tokenizer)
        self.encoder = Encoder(tokenizer, self.eos_token_ids)
        self._eos_texts = tuple(
            filter(None, (str(tokenizer.decode([i])) for i in sorted(self.eos_token_ids)))
        )
        self._tools = ToolForms(self._render_values)

    def prompt_ids(self, conversation: Conversation, num_messages: int) -> list[int]:
        """Return the ids a server sees before it generates message number ``num_messages``.

        Raises: RenderError with the template's own words, or for an id that the target has no row for.
        """
        ids = self.encoder.ids([self._render(conversation, num_messages, generation_prompt=True)])[0]
        if self._is_out_of_range(ids):
            raise RenderError("token_id_out_of_range")
        return ids

    def prompt_lengths(self, prompts: Sequence[tuple[Conversation, int]]) -> list[int | RenderError]:
        """Return for each (conversation, number of messages) the length of its prompt, or why it has none."""
        texts: list[str | RenderError] = []
        for conversation, num_messages in prompts:
            try:
                self._tools.check(conversation)
                texts.append(self._render(conversation, num_messages, generation_prompt=True))
            except RenderError as error:
                texts.append(error)
        encoded = self.encoder.ids([t for t in texts if isinstance(t, str)])
        lengths = iter(
            RenderError("token_id_out_of_range") if self._is_out_of_range(ids) else len(ids)
            for ids in encoded
        )
        return [next(lengths) if isinstance(t, str) else t for t in texts]

    def samples(self, record: Record, max_length: int) -> list[TokenizedSample]:
        """Tokenize one record; see ``prepare``.

        Raises: RenderError when nothing of it can be trained on.
        """
        result = self.prepare([record], max_length)[0]
        if isinstance(result, RenderError):
            raise result
        return result.samples

    def prepare(self, records: Sequence[Record], max_length: int) -> list[Prepared | RenderError]:
        """Tokenize every assistant turn in the context it was generated in.

        Turns whose contexts agree share one sample; a template that renders earlier turns
        differently later on (dropped reasoning, trimmed text) gives one sample for each turn.
        """
        planned: list[list[Turn] | TokenizedSample | RenderError] = []
        for record in records:
            try:
                planned.append(self._plan(record))
            except RenderError as error:
                planned.append(error)
        turns = iter(self.encoder.turns([p for p in planned if isinstance(p, list)]))
        results: list[Prepared | RenderError] = []
        for record, plan in zip(records, planned, strict=True):
            if isinstance(plan, RenderError):
                results.append(plan)
                continue
            merged = [plan] if isinstance(plan, TokenizedSample) else merge_turns(next(turns))
            if any(self._is_out_of_range(sample.input_ids.tolist()) for sample in merged):
                results.append(RenderError("token_id_out_of_range"))
                continue
            results.append(_finish(record.conversation_id, merged, max_length))
        return results

    def message_of(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], cut: bool = False) -> Message:
        """Return the message that a client sends back for a generated answer in the turns after it.

        Where the template reads reasoning apart from content, servers send them apart.
        """
        kept = [i for i in answer_ids if i not in self.eos_token_ids]
        text = str(self.tokenizer.decode(kept, skip_special_tokens=False))
        reasoning, content = None, text
        if self.reads_reasoning:
            prompt_end = str(self.tokenizer.decode(prompt_ids[-_LOOK_BACK:], skip_special_tokens=False))
            reasoning, content = split_reasoning(text, bool(OPENED_THINKING.search(prompt_end)))
        return Message("assistant", content, reasoning, cut=cut)

    @cached_property
    def reads_reasoning(self) -> bool:
        """Whether the template shows an answer's ``reasoning_content``."""
        told = (Message("user", PROBE.format(0)), Message("assistant", PROBE.format(1), PROBE.format(2)))
        try:
            return PROBE.format(2) in self._render(Conversation("probe", told, "probe"), 2, False)
        except RenderError:
            return False

    def end_of_turn_id(self) -> int:
        """Return the token that the template ends an answer with."""
        told = Conversation("probe", (Message("user", PROBE), Message("assistant", PROBE)), "probe")
        ids = self.encoder.ids([self._render(told, 2, generation_prompt=False)])[0]
        return next((i for i in reversed(ids) if i in self.eos_token_ids), min(self.eos_token_ids))

    def _is_out_of_range(self, ids: Sequence[int]) -> bool:
        """Whether the target's embedding lacks a row for an id: Gemma 3's text models have no image token."""
        return max(ids, default=0) >= self.vocab_size

    def _plan(self, record: Record) -> list[Turn] | TokenizedSample:
        if isinstance(record, TokenRow):
            return self._as_sample(record)
        return self._found_turns(record) if isinstance(record, RenderedText) else self._turns(record)

    def _turns(self, conversation: Conversation) -> list[Turn]:
        """Render each answer's prompt and the answer behind it."""
        messages = conversation.messages
        self._tools.check(conversation)
        slots = [i for i, m in enumerate(messages) if m.role == "assistant" and i > 0 and not _is_blank(m)]
        trained = [i for i in slots if messages[i].trained]
        if not trained:
            # The template's own objection says more than ours.
            self._render(conversation, len(messages), generation_prompt=False)
            raise RenderError("marked_not_trained" if slots else _why_no_answer(conversation))
        return [self._turn(conversation, i) for i in trained]

    def _turn(self, conversation: Conversation, index: int) -> Turn:
        message = conversation.messages[index]
        prompt = self._render(conversation, index, generation_prompt=True)
        full = self._render(conversation, index + 1, generation_prompt=False)
        if any(eos in message.content for eos in self._eos_texts):
            raise RenderError("end_of_turn_inside_answer")
        if not full.startswith(prompt):
            full = _continue_thinking(prompt, full, message)
        if message.reasoning and message.reasoning.strip() not in full[len(prompt) :]:
            raise RenderError("template_lacks_reasoning")
        return Turn(prompt, full, message.cut)

    def _found_turns(self, record: RenderedText) -> list[Turn]:
        """Find the answers in text that came rendered: they follow the template's generation prompt."""
        header = self._answer_header()
        starts = [match.end() for match in re.finditer(re.escape(header), record.text)]
        turns = []
        for start, following in zip_longest(starts, starts[1:]):
            full = record.text[:following]
            answer = full[start:].lstrip()
            ended = any(eos in answer for eos in self._eos_texts)
            if following is not None and not ended:
                raise RenderError("no_end_of_turn")
            if answer and not answer.startswith(self._eos_texts):
                turns.append(Turn(record.text[:start], full, cut=not ended))
        if not turns:
            raise RenderError("no_assistant_span")
        return turns

    def _answer_header(self) -> str:
        """Return the text between what the user wrote and what the assistant writes."""
        asked = Conversation("probe", (Message("user", PROBE),), "probe")
        with_prompt = self._render(asked, 1, generation_prompt=True)
        without = self._render(asked, 1, generation_prompt=False)
        added = with_prompt.removeprefix(without)
        return added or with_prompt.rpartition(PROBE)[2]

    def _as_sample(self, row: TokenRow) -> TokenizedSample:
        if not row.loss_mask.any():
            raise RenderError("no_trainable_token")
        if row.input_ids.max() >= self.vocab_size:
            raise RenderError("token_id_out_of_range")
        # Where the last token is an answer's and does not end it, the answer went on.
        cut = bool(row.loss_mask[-1]) and int(row.input_ids[-1]) not in self.eos_token_ids
        if not (cut or (row.loss_mask[:-1] & row.loss_mask[1:]).any()):
            raise RenderError("no_trainable_token")
        return TokenizedSample(row.conversation_id, row.input_ids, row.loss_mask, cut)

    def _render(self, conversation: Conversation, num_messages: int, generation_prompt: bool) -> str:
        messages = self._tools.for_template(conversation, num_messages)
        return self._render_values(messages, list(map(dict, conversation.tools)), generation_prompt)

    def _render_values(self, messages: Any, tools: Any, generation_prompt: bool) -> str:
        """Render what a server is sent.

        Raises: RenderError with the template's own words.
        """
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tools=tools or None,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    **self.template_kwargs,
                )
            )
        except _TEMPLATE_ERRORS as error:
            words = " ".join(str(error).split())[:200]
            raise RenderError(f"template_error: {words}") from None


def _why_no_answer(conversation: Conversation) -> str:
    answers = [i for i, message in enumerate(conversation.messages) if message.role == "assistant"]
    if not answers:
        return "no_assistant_turn"
    return "starts_with_assistant" if answers == [0] else "blank_assistant"


def _is_blank(message: Message) -> bool:
    return not (message.content.strip() or message.tool_calls or (message.reasoning or "").strip())


def _continue_thinking(prompt: str, full: str, message: Message) -> str:
    """Return prompt and answer where the prompt opens the reasoning that the template's history leaves out.

    Raises: RenderError when the answer cannot have been generated after this prompt.
    """
    opened = OPENED_THINKING.search(prompt)
    before = prompt[: opened.start()] if opened else None
    if before is None or not full.startswith(before):
        raise RenderError("answer_in_other_context")
    inline, closed, _ = message.content.partition("</think>")
    reasoning = message.reasoning or (inline.partition("<think>")[2] or inline if closed else "")
    if not reasoning.strip():
        raise RenderError("prompt_opens_thinking")
    return f"{prompt}{reasoning.strip()}\n</think>\n\n{full[len(before) :].lstrip()}"


def _finish(conversation_id: str, merged: list[TokenizedSample], max_length: int) -> Prepared | RenderError:
    if not merged:
        return RenderError("no_trainable_token")
    kept = cut_samples(conversation_id, merged, max_length)
    if not kept:
        return RenderError("truncated_before_assistant")
    lost = sum(int(s.loss_mask.sum()) for s in merged) - sum(int(s.loss_mask.sum()) for s in kept)
    return Prepared(kept, lost)
