"""prepare: conversations become tokenized samples, split into train and held-out."""

from pathlib import Path

from eyas.data.chat import ChatRenderer, RenderError
from eyas.data.prepared import PreparedWriter, Split
from eyas.data.sources import Drop, in_held_out, read_sources
from eyas.errors import UserError
from eyas.files import sha256_of_file
from eyas.progress import say
from eyas.stages.context import RunContext, begin, finish, next_command
from eyas.types import Conversation


def prepare(context: RunContext) -> None:
    """Read the sources, drop what cannot be trained on (with reasons), tokenize the rest."""
    config = context.config
    for source in config.data.sources:
        if not Path(source).is_file():
            raise UserError(f"there is no data file {source}", hint="set data.sources to existing files")
    inputs = {
        "data": config.data.model_dump(mode="json"),
        "sources": [sha256_of_file(Path(s)) for s in config.data.sources],
        "seed": config.seed,
        "regenerate": {"enabled": config.regenerate.enabled},
        "tokenizer": context.spec.tokenizer_fingerprint,
        "template": context.spec.template_fingerprint,
    }
    if not begin(context, "prepare", inputs):
        return
    folder = context.folder("prepare")
    writer = PreparedWriter(folder)
    renderer = ChatRenderer(context.tokenizer, context.spec.eos_token_ids)
    seen: dict[str, tuple[object, ...]] = {}
    num_read = 0
    for row in read_sources(config.data.sources):
        num_read += 1
        if isinstance(row, Drop):
            writer.drop(row)
            continue
        if row.conversation_id in seen:
            _check_duplicate(row, seen[row.conversation_id])
            writer.drop(Drop(row.conversation_id, row.source, "duplicate"))
            continue
        seen[row.conversation_id] = row.messages
        split: Split = (
            "held_out"
            if in_held_out(row.conversation_id, config.data.held_out_share, config.seed)
            else "train"
        )
        reason = _add(writer, renderer, context, split, row)
        if reason:
            writer.drop(Drop(row.conversation_id, row.source, reason))
    num_dropped = sum(writer.drops.values())
    try:
        _check_enough(writer, num_read, num_dropped, config.data.max_drop_share)
    except UserError:
        writer.close()
        raise
    manifest = writer.finish(
        tokenizer_fingerprint=context.spec.tokenizer_fingerprint,
        template_fingerprint=context.spec.template_fingerprint,
        num_read=num_read,
    )
    finish(context, "prepare", manifest["fingerprint"], counts=manifest["counts"], drops=manifest["drops"])
    counts = manifest["counts"]
    say(
        f"prepare: {num_read} rows read, {counts.get('train_conversations', 0)} conversations to train on, "
        f"{counts.get('held_out_conversations', 0)} held out, {num_dropped} dropped"
    )
    next_command(context, "prepare")


def _add(
    writer: PreparedWriter, renderer: ChatRenderer, context: RunContext, split: Split, row: Conversation
) -> str | None:
    """Add a conversation, or return why it cannot be used."""
    config = context.config
    try:
        if config.regenerate.enabled:
            slots = answer_slots(row)
            if not slots:
                return "no turn for the assistant to answer"
            if len(renderer.prompt_ids(row, slots[0])) >= config.data.max_length:
                return "prompt longer than data.max_length"
        else:
            samples = renderer.samples(row, config.data.max_length)
            if not samples:
                return "no supervised token"
            for sample in samples:
                writer.add_sample(split, sample)
    except RenderError as error:
        return str(error)
    writer.add_conversation(split, row)
    return None


def answer_slots(conversation: Conversation) -> list[int]:
    """Return the message indices that the target answers: assistant turns, and the one after the last."""
    messages = conversation.messages
    slots = [i for i, m in enumerate(messages) if m.role == "assistant" and i > 0]
    if messages[-1].role != "assistant":
        slots.append(len(messages))
    return slots


def _check_duplicate(row: Conversation, first: tuple[object, ...]) -> None:
    if first != row.messages:
        raise UserError(
            f"two conversations have the id {row.conversation_id!r} and different text (second in {row.source})",
            hint="give each conversation an id of its own, or leave ids out",
        )


def _check_enough(writer: PreparedWriter, num_read: int, num_dropped: int, max_share: float) -> None:
    most = writer.drops.most_common(1)
    why = f"; most often: {most[0][0]} ({most[0][1]} rows)" if most else ""
    if not writer.counts["train_conversations"]:
        raise UserError(f"no conversation is left to train on: {num_read} rows read{why}",
                        hint="each row needs 'messages' or a 'prompt'; see drops.jsonl")  # fmt: skip
    if not writer.counts["held_out_conversations"]:
        raise UserError(
            "no conversation is held out for validation",
            hint="raise data.held_out_share or add conversations",
        )
    if num_dropped > max_share * num_read:
        raise UserError(
            f"{num_dropped} of {num_read} rows were dropped, more than data.max_drop_share={max_share}{why}",
            hint="mend the data, or raise data.max_drop_share",
        )
