"""What a block of records gives: samples, or prompts that the target can answer."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from eyas.data.answer_slots import answer_slots, why_no_slot
from eyas.data.chat import ChatRenderer
from eyas.data.records import Record, TokenRow
from eyas.data.render_error import RenderError
from eyas.data.samples import mask_ends
from eyas.types import Conversation, TokenizedSample


def samples_of(
    renderer: ChatRenderer, block: Sequence[Record], max_length: int, counts: Counter[str]
) -> Iterator[list[TokenizedSample] | str]:
    """Yield each record's samples, or why it has none; ``counts`` adds up what the length limit cost."""
    for result in renderer.prepare(block, max_length):
        if isinstance(result, RenderError):
            yield str(result)
            continue
        if result.num_cut_tokens:
            counts["cut_conversations"] += 1
            counts["cut_supervised_tokens"] += result.num_cut_tokens
        yield result.samples


def check_prompts(
    renderer: ChatRenderer, block: Sequence[Record], max_length: int
) -> Iterator[list[TokenizedSample] | str]:
    """Yield no samples for a record whose prompt the target can answer, or why it cannot."""
    slots = [answer_slots(r) if isinstance(r, Conversation) else [] for r in block]
    asked = [(r, s[0]) for r, s in zip(block, slots, strict=True) if s and isinstance(r, Conversation)]
    lengths = iter(renderer.prompt_lengths(asked))
    for record, record_slots in zip(block, slots, strict=True):
        if not record_slots:
            # Rendered text and token rows hold no messages that another answer could be put into.
            yield why_no_slot(record) if isinstance(record, Conversation) else "not_a_conversation"
            continue
        length = next(lengths)
        if isinstance(length, RenderError):
            yield str(length)
        else:
            yield [] if length < max_length else "prompt_too_long"


def warnings_of(record: Record, samples: Sequence[TokenizedSample], renderer: ChatRenderer) -> Iterator[str]:
    """Yield what is odd about a record that is kept."""
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
