"""regenerate: the target answers the prompts itself, so that the draft learns what it has to predict."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.data.chat import ChatRenderer, RenderError, finish_samples, generated_turn
from eyas.data.prepared import PreparedWriter, Split, read_conversations
from eyas.data.sources import Drop
from eyas.engines.base import Prompt, Sampling
from eyas.errors import EyasError, UserError
from eyas.progress import Progress, say
from eyas.stages.context import RunContext, begin, finish, next_command
from eyas.stages.prepare import answer_slots
from eyas.types import Completion, Conversation, Failure, Message, TokenizedSample


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
        "regenerate": config.regenerate.model_dump(mode="json", exclude={"batch_size"}),
        "max_length": config.data.max_length,
        "seed": config.seed,
    }
    if not begin(context, "regenerate", inputs):
        return
    folder = context.folder("regenerate")
    renderer = ChatRenderer(context.tokenizer, context.spec.eos_token_ids)
    dialogues = [
        _Dialogue(split, conversation, answer_slots(conversation))
        for split, conversation in read_conversations(context.folder("prepare"))
    ]
    journal = _Journal(folder / "answers.jsonl")
    engine = None
    try:
        for round_number in range(max(len(d.slots) for d in dialogues)):
            waiting = [d for d in dialogues if round_number < len(d.slots) and d.trouble is None]
            prompts = _prompts(waiting, round_number, renderer, config.data.max_length)
            missing = [p for p in prompts.values() if p.prompt_id not in journal.answers]
            if missing and engine is None:
                engine = context.make_engine(
                    config.regenerate.engine, batch_size=config.regenerate.batch_size
                )
            if missing:
                sampling = Sampling(
                    config.regenerate.max_new_tokens, config.regenerate.temperature, config.seed
                )
                _answer(engine, missing, sampling, journal, f"regenerate, turn {round_number + 1}")
            for dialogue in waiting:
                prompt = prompts.get(dialogue.prompt_id(round_number))
                if prompt is not None:
                    _take(dialogue, round_number, prompt, journal.answers[prompt.prompt_id], renderer)
    finally:
        if engine is not None:
            engine.close()
    manifest = _write(context, dialogues)
    finish(context, "regenerate", manifest["fingerprint"], counts=manifest["counts"], drops=manifest["drops"])
    counts = manifest["counts"]
    say(
        f"regenerate: {counts['train_supervised_tokens']:,} tokens to train on, "
        f"{counts.get('held_out_supervised_tokens', 0):,} held out"
    )
    next_command(context, "regenerate")


class _Journal:
    """Answers on disk, one line each, so that an interrupted stage goes on where it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[str, Completion] = {}
        if path.is_file():
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):  # a line torn by a crash
                path.write_bytes(whole)
            for line in whole.splitlines():
                value = json.loads(line)
                value["token_ids"] = tuple(value["token_ids"])
                self.answers[value["prompt_id"]] = Completion(**value)

    def add(self, completion: Completion) -> None:
        self.answers[completion.prompt_id] = completion
        with self.path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(dataclasses.asdict(completion)) + "\n")


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
            dialogue.trouble = "prompt longer than data.max_length"
            continue
        prompt_id = dialogue.prompt_id(round_number)
        prompts[prompt_id] = Prompt(prompt_id, tuple(ids))
    return prompts


def _answer(engine: Any, prompts: list[Prompt], sampling: Sampling, journal: _Journal, label: str) -> None:
    num_tokens = 0
    with Progress(label, len(prompts), "answers") as progress:
        for item in _one_for_one(engine.generate(prompts, sampling), prompts):
            if isinstance(item, Failure):
                raise EyasError(f"the engine failed on {item.sample_id}: {item.reason}")
            journal.add(item)
            num_tokens += len(item.token_ids)
            progress.advance(1, f"{num_tokens / max(progress.elapsed_s, 1e-9):,.0f} tokens/s")


def _one_for_one(
    items: Iterator[Completion | Failure], prompts: list[Prompt]
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
    turn = generated_turn(
        conversation.conversation_id, prompt.token_ids, answer.token_ids, cut=answer.finish_reason == "length"
    )
    if turn is not None:
        dialogue.turns.append(turn)
    ids = [i for i in answer.token_ids if i not in renderer.eos_token_ids]
    text = str(renderer.tokenizer.decode(ids, skip_special_tokens=False))
    messages = list(conversation.messages)
    messages[slot : slot + 1] = [Message("assistant", text)]
    dialogue.conversation = dataclasses.replace(conversation, messages=tuple(messages))


def _write(context: RunContext, dialogues: list[_Dialogue]) -> dict[str, Any]:
    writer = PreparedWriter(context.folder("regenerate"))
    for dialogue in dialogues:
        conversation = dialogue.conversation
        samples = finish_samples(conversation.conversation_id, dialogue.turns, context.config.data.max_length)
        for sample in samples:
            writer.add_sample(dialogue.split, sample)
        writer.add_conversation(dialogue.split, conversation)
        if dialogue.trouble or not samples:
            reason = dialogue.trouble or "the target answered with nothing"
            writer.drop(Drop(conversation.conversation_id, conversation.source, reason))
    if not writer.counts["train_samples"] or not writer.counts["held_out_samples"]:
        raise EyasError(
            "the target's answers hold nothing to train on", hint="see drops.jsonl in the run folder"
        )
    return writer.finish(
        tokenizer_fingerprint=context.spec.tokenizer_fingerprint,
        template_fingerprint=context.spec.template_fingerprint,
    )
