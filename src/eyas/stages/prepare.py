"""prepare: conversations become tokenized samples, split into train and held-out."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from shutil import rmtree
from typing import Any

from eyas.config.schema import DataSettings
from eyas.data.answer_slots import answer_slots
from eyas.data.chat import ChatRenderer, RenderError
from eyas.data.dedup_and_split import SeenRows, below_share, hash_of, split_key
from eyas.data.prepared import PreparedWriter, Split, is_whole
from eyas.data.row_formats import Record, RenderedText, TokenRow, parse_row
from eyas.data.samples import mask_ends
from eyas.data.sources import BROKEN, Drop, read_source, source_fingerprint
from eyas.errors import EyasError, UserError
from eyas.progress import Progress, say
from eyas.stages.run_context import RunContext, begin, finish, next_command
from eyas.types import Conversation, TokenizedSample

_BLOCK_ROWS = 512
_BLOCK_CHARACTERS = 2_000_000
_PLACES_NAMED = 5
_FIRST_RECORDS = 256


def prepare(context: RunContext) -> None:
    """Read the sources, drop what cannot be trained on (with reasons), tokenize the rest."""
    config = context.config
    inputs = {
        "data": config.data.model_dump(mode="json", exclude={"max_drop_share"}),
        "sources": [source_fingerprint(path) for path, _ in config.data.weighted_sources],
        "seed": config.seed,
        "regenerate": {"enabled": config.regenerate.enabled},
        "tokenizer": context.spec.tokenizer_fingerprint,
        "template": context.spec.template_fingerprint,
    }
    if not begin(context, "prepare", inputs, lambda: is_whole(context.folder("prepare"))):
        return
    failed_drops = config.run_dir / "prepared-drops.jsonl"
    failed_drops.unlink(missing_ok=True)
    tally = _Tally()
    try:
        with PreparedWriter(context.folder("prepare"), context.spec.vocab_size) as writer:
            _write_all(context, writer, tally)
            _check_enough(writer, tally, config.data, failed_drops)
            manifest = writer.finish(
                tokenizer_fingerprint=context.spec.tokenizer_fingerprint,
                template_fingerprint=context.spec.template_fingerprint,
                template_kwargs=config.data.template_kwargs,
                num_read=tally.num_read,
                num_left_out_by_weight=tally.num_left_out,
                shapes=dict(tally.shapes),
                warnings=dict(tally.warnings),
            )
    except EyasError:
        # A data set that was refused leaves its list of drops, and nothing that looks like data.
        (context.folder("prepare") / "drops.jsonl").replace(failed_drops)
        rmtree(context.folder("prepare"))
        raise
    finish(context, "prepare", manifest["fingerprint"], counts=manifest["counts"], drops=manifest["drops"])
    _tell(manifest)
    next_command(context, "prepare")


def new_renderer(context: RunContext) -> ChatRenderer:
    """Return the renderer for the run's target and template settings."""
    spec, data = context.spec, context.config.data
    return ChatRenderer(context.tokenizer, spec.eos_token_ids, data.template_kwargs, spec.vocab_size)


@dataclass
class _Tally:
    num_read: int = 0
    num_left_out: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    warnings: Counter[str] = field(default_factory=Counter)
    broken_places: list[str] = field(default_factory=list)


def _write_all(context: RunContext, writer: PreparedWriter, tally: _Tally) -> None:
    config = context.config
    renderer = new_renderer(context)
    sides = _Sides(writer, config.data.validation_fraction, str(config.seed))
    with Progress("prepare", None, "rows") as progress:
        for block in _blocks(_records(config.data, config.seed, writer, tally)):
            tokenized = _prompts_only if config.regenerate.enabled else _with_answers
            for record, result in zip(block, tokenized(renderer, block, config.data, writer), strict=True):
                if isinstance(result, str):
                    writer.drop(Drop(record.conversation_id, record.source, result))
                    continue
                tally.warnings.update(_warnings(record, result, renderer))
                sides.add(record, result)
            progress.advance(len(block))
        sides.settle()


def _records(data: DataSettings, seed: int, writer: PreparedWriter, tally: _Tally) -> Iterator[Record]:
    """Yield each distinct record once; what is none goes to the writer's drops."""
    with SeenRows() as seen:
        for path, weight in data.weighted_sources:
            for row in read_source(path):
                if isinstance(row, Drop):
                    record: Record | Drop = row
                    if len(tally.broken_places) < _PLACES_NAMED:
                        tally.broken_places.append(row.source)
                else:
                    parsed = parse_row(row, data.role_map)
                    record = parsed.record
                    tally.shapes[parsed.shape] += 1
                    if not below_share(_id_of(record), weight, f"{seed}:{path}"):
                        tally.num_left_out += 1
                        continue
                    if not isinstance(record, Drop) and seen.is_repeat(record, parsed.said):
                        record = Drop(record.conversation_id, record.source, "duplicate")
                tally.num_read += 1
                if isinstance(record, Drop):
                    writer.drop(record)
                else:
                    yield record


def _id_of(record: Record | Drop) -> str:
    return record.row_id if isinstance(record, Drop) else record.conversation_id


def _blocks(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Group records so that a block is worth a batch and never large, whatever the rows' lengths."""
    block: list[Record] = []
    size = 0
    for record in records:
        block.append(record)
        if isinstance(record, Conversation):
            # Each answer is rendered with all that comes before it.
            answers = sum(m.role == "assistant" for m in record.messages)
            size += sum(len(m.content) for m in record.messages) * (1 + answers)
        else:
            size += len(record.text if isinstance(record, RenderedText) else record.input_ids)
        if len(block) >= _BLOCK_ROWS or size >= _BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
    if block:
        yield block


def _with_answers(
    renderer: ChatRenderer, block: list[Record], data: DataSettings, writer: PreparedWriter
) -> Iterator[list[TokenizedSample] | str]:
    """Yield each record's samples, or why it has none."""
    for result in renderer.prepare(block, data.max_length):
        if isinstance(result, RenderError):
            yield str(result)
            continue
        if result.num_cut_tokens:
            writer.counts["cut_conversations"] += 1
            writer.counts["cut_supervised_tokens"] += result.num_cut_tokens
        yield result.samples


def _prompts_only(
    renderer: ChatRenderer, block: list[Record], data: DataSettings, writer: PreparedWriter
) -> Iterator[list[TokenizedSample] | str]:
    """Yield no samples for a record whose prompt the target can answer, or why it cannot."""
    slots = [answer_slots(r) if isinstance(r, Conversation) else [] for r in block]
    asked = [(r, s[0]) for r, s in zip(block, slots, strict=True) if s and isinstance(r, Conversation)]
    lengths = iter(renderer.prompt_lengths(asked))
    for record, record_slots in zip(block, slots, strict=True):
        if not record_slots:
            # Rendered text and token rows hold no messages that another answer could be put into.
            yield "starts_with_assistant" if isinstance(record, Conversation) else "not_a_conversation"
            continue
        length = next(lengths)
        if isinstance(length, RenderError):
            yield str(length)
        else:
            yield [] if length < data.max_length else "prompt_too_long"


def _warnings(record: Record, samples: list[TokenizedSample], renderer: ChatRenderer) -> Iterator[str]:
    if isinstance(record, Conversation):
        roles = [m.role for m in record.messages]
        if any(a == b and a in ("user", "assistant") for a, b in pairwise(roles)):
            yield "repeated_role"
    if isinstance(record, TokenRow):
        ends = sum((mask_ends(s, renderer.eos_token_ids) for s in samples), Counter())
        for where in ("before", "behind"):
            if ends[where] > ends["at"]:
                yield f"mask_ends_one_token_{where}_end_of_turn"
    if any(not s.cut and s.loss_mask[-1] and s.input_ids[-1] not in renderer.eos_token_ids for s in samples):
        yield "no_end_of_turn"


class _Sides:
    """Puts records on their side of the split by the hash of what they ask.

    So that a small data set has both sides, the first records wait for each other: where all of them
    would go to one side, the one with the most extreme hash goes to the other.
    """

    def __init__(self, writer: PreparedWriter, share: float, salt: str) -> None:
        self.writer, self.share, self.salt = writer, share, salt
        self._first: list[tuple[int, Record, list[TokenizedSample]]] | None = []
        self._forced: dict[int, Split] = {}

    def add(self, record: Record, samples: list[TokenizedSample]) -> None:
        number = hash_of(split_key(record), self.salt)
        if self._first is None:
            self._write(self._side(number), record, samples)
            return
        self._first.append((number, record, samples))
        if len(self._first) >= _FIRST_RECORDS:
            self.settle()

    def settle(self) -> None:
        """Write what waits."""
        first, self._first = self._first or [], None
        numbers = {number for number, _, _ in first}
        sides = {self._side(number) for number in numbers}
        if sides == {"held_out"}:
            self._forced = {max(numbers): "train"}
        elif self.share and len(numbers) > 1 and sides == {"train"}:
            self._forced = {min(numbers): "held_out"}
        for number, record, samples in first:
            self._write(self._side(number), record, samples)

    def _side(self, number: int) -> Split:
        return self._forced.get(number) or ("held_out" if number < self.share * 2**64 else "train")

    def _write(self, split: Split, record: Record, samples: list[TokenizedSample]) -> None:
        self.writer.counts[f"{split}_conversations"] += 1
        if isinstance(record, Conversation):
            self.writer.add_conversation(split, record)
        for sample in samples:
            self.writer.add_sample(split, sample)


def _check_enough(writer: PreparedWriter, tally: _Tally, data: DataSettings, drops_file: Path) -> None:
    num_dropped = sum(writer.drops.values())
    kept = writer.counts["train_conversations"] + writer.counts["held_out_conversations"]
    assert kept + num_dropped == tally.num_read
    why = "".join(f"; {reason}: {n}" for reason, n in writer.drops.most_common(3))
    if writer.drops[BROKEN] and not data.skip_broken_lines:
        places = ", ".join(tally.broken_places)
        more = " and more" if writer.drops[BROKEN] > len(tally.broken_places) else ""
        raise UserError(
            f"{writer.drops[BROKEN]} broken lines: {places}{more}",
            hint="mend them, or set data.skip_broken_lines=true to go on without them",
        )
    if not kept:
        raise UserError(
            f"nothing is left to train on: {tally.num_read} rows read, all dropped{why}",
            hint=f"{drops_file} names every row; docs/data.md explains the reasons",
        )
    if num_dropped > data.max_drop_share * tally.num_read:
        raise UserError(
            f"{num_dropped} of {tally.num_read} rows were dropped, more than "
            f"data.max_drop_share={data.max_drop_share}{why}",
            hint=f"mend the data ({drops_file} names every row), or raise data.max_drop_share",
        )


def _tell(manifest: dict[str, Any]) -> None:
    counts, drops = manifest["counts"], manifest["drops"]
    say(
        f"prepare: {manifest['num_read']:,} rows read, "
        f"{counts.get('train_conversations', 0):,} conversations to train on, "
        f"{counts.get('held_out_conversations', 0):,} held out, {sum(drops.values()):,} dropped"
    )
    say("  shapes: " + ", ".join(f"{shape} ({n:,})" for shape, n in manifest["shapes"].items()))
    for reason, number in list(drops.items())[:5]:
        say(f"  dropped: {reason} ({number:,})")
    for warning, number in manifest["warnings"].items():
        say(f"  warning: {warning} in {number:,} conversations")
    if counts.get("cut_conversations"):
        say(f"  cut to data.max_length: {counts['cut_conversations']:,} conversations, "
            f"{counts['cut_supervised_tokens']:,} supervised tokens lost")  # fmt: skip
    if not counts.get("held_out_conversations"):
        say(
            "  warning: nothing is held out for validation; "
            "raise data.validation_fraction or add conversations"
        )
