"""regenerate: the target answers the prompts itself, so that the draft learns what it has to predict."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

from eyas.data.answer_journal import AnswerJournal
from eyas.data.answer_slots import answer_slots
from eyas.data.chat import ChatRenderer, RenderError
from eyas.data.prepared import PreparedWriter, Split, is_whole, read_conversations, read_manifest
from eyas.data.samples import cut_samples, generated_turn, merge_turns
from eyas.data.sources import Drop
from eyas.engines.base import Prompt, Sampling
from eyas.errors import EyasError, UserError
from eyas.progress import Progress, say
from eyas.stages.prepare import new_renderer
from eyas.stages.run_context import RunContext, begin, finish, next_command
from eyas.types import Completion, Conversation, Failure, Message, TokenizedSample

# How the answers are fetched is no part of what they are.
_HOW = {"batch_size", "endpoint", "concurrency", "timeout_s", "max_failures"}
_BLOCK_ROWS = 8192


@dataclasses.dataclass
class _Dialogue:
    """A conversation as far as the target has answered it."""

    split: Split
    conversation: Conversation
    slots: list[int]
    turns: list[TokenizedSample] = dataclasses.field(default_factory=list)
    trouble: str | None = None

    def prompt_id(self, round_number: int) -> str:
        return f"{self.conversation.conversation_id}:{round_number}"


def regenerate(context: RunContext) -> None:
    """Answer every assistant turn in order, each on the target's own history."""
    config = context.config
    if not config.regenerate.enabled:
        raise UserError(
            "regenerate.enabled is false", hint="set regenerate.enabled=true, or go on to: eyas extract"
        )
    inputs = {
        "prepared": context.output_of("prepare"),
        "target": context.spec.fingerprint,
        "regenerate": config.regenerate.model_dump(mode="json", exclude=_HOW),
        "max_length": config.data.max_length,
        "seed": config.seed,
    }
    if not begin(context, "regenerate", inputs, lambda: is_whole(context.folder("regenerate"))):
        return
    with (
        closing(_Work(context)) as work,
        PreparedWriter(context.folder("regenerate"), context.spec.vocab_size) as writer,
    ):
        conversations = read_conversations(context.folder("prepare"))
        while block := [_Dialogue(s, c, answer_slots(c)) for s, c in islice(conversations, _BLOCK_ROWS)]:
            work.answer(block)
            for dialogue in block:
                _write(writer, dialogue, config.data.max_length)
        manifest = _finish(context, writer, work)
    counts = manifest["counts"]
    say(
        f"regenerate: {counts['train_supervised_tokens']:,} tokens to train on, "
        f"{counts.get('held_out_supervised_tokens', 0):,} held out"
    )
    if work.num_retokenized:
        say(f"  warning: {work.num_retokenized:,} answers came back as text and were tokenized again; "
            "vLLM returns token ids")  # fmt: skip
    next_command(context, "regenerate")


class _Work:
    """Answers dialogues round by round, from the journal or by the engine, which starts when it is needed."""

    def __init__(self, context: RunContext) -> None:
        config = context.config
        self.context, self.settings = context, config.regenerate
        self.max_length = config.data.max_length
        self.sampling = Sampling(self.settings.max_new_tokens, self.settings.temperature, config.seed)
        self.renderer = new_renderer(context)
        self.journal = AnswerJournal(context.folder("regenerate") / "answers.jsonl")
        self.finish_reasons: Counter[str] = Counter()
        self.num_failed = 0
        self.served_by: str | None = None
        self._engine: Any = None
        if len(self.journal):
            say(f"regenerate: going on after {len(self.journal):,} answers")

    @property
    def num_retokenized(self) -> int:
        return getattr(self._engine, "num_retokenized", 0)

    def answer(self, dialogues: list[_Dialogue]) -> None:
        for round_number in range(max(len(d.slots) for d in dialogues)):
            waiting = [d for d in dialogues if round_number < len(d.slots) and d.trouble is None]
            prompts = _prompts(waiting, round_number, self.renderer, self.max_length)
            missing = [p for p in prompts.values() if p.prompt_id not in self.journal]
            failures = self._generate(missing, waiting, f"regenerate, turn {round_number + 1}")
            for dialogue in waiting:
                prompt = prompts.get(dialogue.prompt_id(round_number))
                if prompt is None:
                    continue
                if prompt.prompt_id in failures:
                    dialogue.trouble = f"generation_failed: {failures[prompt.prompt_id]}"
                    continue
                answer = self.journal.read(prompt.prompt_id)
                self.finish_reasons[answer.finish_reason] += 1
                _take(dialogue, round_number, prompt, answer, self.renderer)

    def close(self) -> None:
        self.journal.close()
        if self._engine is not None:
            self._engine.close()

    def _generate(self, prompts: list[Prompt], waiting: list[_Dialogue], label: str) -> dict[str, str]:
        """Journal an answer to each prompt; return those that failed, with the reason."""
        failures: dict[str, str] = {}
        if not prompts:
            return failures
        if self._engine is None:
            self._engine = self._start_engine(waiting)
        num_tokens = 0
        with Progress(label, len(prompts), "answers") as progress:
            for item in _one_for_one(self._engine.generate(prompts, self.sampling), prompts):
                if isinstance(item, Failure):
                    failures[item.sample_id] = item.reason
                    self._check_failures(item)
                else:
                    self.journal.add(item)
                    num_tokens += len(item.token_ids)
                progress.advance(1, f"{num_tokens / max(progress.elapsed_s, 1e-9):,.0f} tokens/s")
        return failures

    def _check_failures(self, failure: Failure) -> None:
        self.num_failed += 1
        if self.num_failed > self.settings.max_failures:
            raise EyasError(
                f"{self.num_failed} answers failed, more than regenerate.max_failures="
                f"{self.settings.max_failures}; last: {failure.sample_id}: {failure.reason}",
                hint="finished answers are kept; mend the cause and run the same command again",
            )

    def _start_engine(self, waiting: list[_Dialogue]) -> Any:
        settings = self.settings
        if settings.endpoint is None:
            return self.context.make_engine(settings.engine, batch_size=settings.batch_size)
        from eyas.engines.endpoint import EndpointEngine

        engine = EndpointEngine(
            settings.endpoint,
            self.context.spec,
            self.context.tokenizer,
            end_of_turn_id=self.renderer.end_of_turn_id(),
            concurrency=settings.concurrency,
            timeout_s=settings.timeout_s,
            extra_body=settings.extra_body,
        )
        self.served_by = engine.model
        compared = [self._same_rendering(engine, d.conversation, d.slots[0]) for d in waiting[:3]]
        if not all(compared):
            say("  the server offers no rendering to compare with; prompts are sent as token ids")
        return engine

    def _same_rendering(self, engine: Any, conversation: Conversation, slot: int) -> bool:
        try:
            ours = self.renderer.prompt_ids(conversation, slot)
        except RenderError:
            return True  # dropped anyway
        messages = conversation.for_template()[:slot]
        tools = [dict(tool) for tool in conversation.tools]
        return bool(engine.check_rendering(messages, tools, self.renderer.template_kwargs, ours))


def _prompts(
    dialogues: list[_Dialogue], round_number: int, renderer: ChatRenderer, max_length: int
) -> dict[str, Prompt]:
    prompts: dict[str, Prompt] = {}
    for dialogue in dialogues:
        try:
            ids = renderer.prompt_ids(dialogue.conversation, dialogue.slots[round_number])
        except RenderError as error:
            dialogue.trouble = str(error)
            continue
        if len(ids) >= max_length:
            dialogue.trouble = "prompt_too_long"
            continue
        prompt_id = dialogue.prompt_id(round_number)
        prompts[prompt_id] = Prompt(prompt_id, tuple(ids))
    return prompts


def _one_for_one(
    items: Iterable[Completion | Failure], prompts: list[Prompt]
) -> Iterator[Completion | Failure]:
    """Pass on what an engine yields; it must be exactly one item for each prompt."""
    open_ids = {p.prompt_id for p in prompts}
    for item in items:
        item_id = item.sample_id if isinstance(item, Failure) else item.prompt_id
        if item_id not in open_ids:
            raise EyasError(f"the engine answered {item_id} twice or unasked")
        open_ids.remove(item_id)
        yield item
    if open_ids:
        raise EyasError(f"the engine gave no answer to {len(open_ids)} prompts, such as {min(open_ids)}")


def _take(
    dialogue: _Dialogue, round_number: int, prompt: Prompt, answer: Completion, renderer: ChatRenderer
) -> None:
    """Put an answer into the conversation's history and keep its tokens for training."""
    conversation, slot = dialogue.conversation, dialogue.slots[round_number]
    # No end-of-turn is invented: an answer that met the length limit is marked as going on.
    cut = answer.finish_reason == "length"
    turn = generated_turn(conversation.conversation_id, prompt.token_ids, answer.token_ids, cut)
    if turn is not None:
        dialogue.turns.append(turn)
    ids = [i for i in answer.token_ids if i not in renderer.eos_token_ids]
    text = str(renderer.tokenizer.decode(ids, skip_special_tokens=False))
    messages = list(conversation.messages)
    messages[slot : slot + 1] = [Message("assistant", text, cut=cut)]
    dialogue.conversation = dataclasses.replace(conversation, messages=tuple(messages))


def _write(writer: PreparedWriter, dialogue: _Dialogue, max_length: int) -> None:
    conversation = dialogue.conversation
    samples = cut_samples(conversation.conversation_id, merge_turns(dialogue.turns), max_length)
    if not samples:
        reason = dialogue.trouble or "empty_answer"
        writer.drop(Drop(conversation.conversation_id, conversation.source, reason))
        return
    if dialogue.trouble:
        # What was answered before the trouble is sound; the rest is another model's and is left out.
        writer.counts["stopped_early_conversations"] += 1
        answered = conversation.messages[: dialogue.slots[len(dialogue.turns)]]
        conversation = dataclasses.replace(conversation, messages=answered)
    writer.counts[f"{dialogue.split}_conversations"] += 1
    for sample in samples:
        writer.add_sample(dialogue.split, sample)
    writer.add_conversation(dialogue.split, conversation)


def _finish(context: RunContext, writer: PreparedWriter, work: _Work) -> dict[str, Any]:
    if not writer.counts["train_samples"]:
        raise EyasError(
            "the target's answers hold nothing to train on",
            hint=f"see {context.folder('regenerate') / 'drops.jsonl'}",
        )
    prepared = read_manifest(context.folder("prepare"))
    manifest = writer.finish(
        tokenizer_fingerprint=context.spec.tokenizer_fingerprint,
        template_fingerprint=context.spec.template_fingerprint,
        template_kwargs=prepared["template_kwargs"],
        num_read=sum(prepared["counts"].get(f"{split}_conversations", 0) for split in ("train", "held_out")),
        sampling={**dataclasses.asdict(work.sampling), **context.config.regenerate.extra_body},
        served_by=work.served_by or context.config.regenerate.engine,
        finish_reasons=dict(work.finish_reasons),
        num_retokenized=work.num_retokenized,
    )
    finish(context, "regenerate", manifest["fingerprint"], counts=manifest["counts"], drops=manifest["drops"])
    return manifest
