"""The rows of all sources become records, each once."""

from collections.abc import Iterator

from eyas.config.schema import DataSettings
from eyas.data.dedup_and_split import SeenRows, below_share
from eyas.data.prepared import PreparedWriter
from eyas.data.records import Record, RenderedText
from eyas.data.row_formats import parse_row
from eyas.data.sources import Drop, entries_left_out, read_source
from eyas.data.tally import Tally
from eyas.types import Conversation

_BLOCK_ROWS = 512
_BLOCK_CHARACTERS = 2_000_000


def read_blocks(
    data: DataSettings, seed: int, writer: PreparedWriter, tally: Tally
) -> Iterator[list[Record]]:
    """Yield the distinct records in blocks that are worth a batch and never large, however long the rows are.

    Rows that hold no record go to the writer's drops.
    """
    block: list[Record] = []
    size = 0
    for record in _records(data, seed, writer, tally):
        block.append(record)
        size += _size(record)
        if len(block) >= _BLOCK_ROWS or size >= _BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
    if block:
        yield block


def _records(data: DataSettings, seed: int, writer: PreparedWriter, tally: Tally) -> Iterator[Record]:
    with SeenRows() as seen:
        for path, weight in data.weighted_sources:
            tally.unused_files += entries_left_out(path)
            for row in read_source(path):
                if isinstance(row, Drop):
                    record: Record | Drop = row
                    tally.add_broken(row.source)
                else:
                    parsed = parse_row(row, data.role_map, data.ignore_keys)
                    record = parsed.record
                    tally.shapes[parsed.shape] += 1
                    if not below_share(_id_of(record), weight, f"{seed}:{path}"):
                        tally.num_left_out += 1
                        continue
                    tally.add_unused(parsed)
                    if not isinstance(record, Drop) and seen.is_repeat(record, parsed.said):
                        record = Drop(record.conversation_id, record.source, "duplicate")
                tally.num_read += 1
                if isinstance(record, Drop):
                    writer.drop(record)
                else:
                    yield record


def _id_of(record: Record | Drop) -> str:
    return record.row_id if isinstance(record, Drop) else record.conversation_id


def _size(record: Record) -> int:
    if isinstance(record, Conversation):
        # Each answer is rendered with all that comes before it.
        answers = sum(m.role == "assistant" for m in record.messages)
        return sum(len(m.content) for m in record.messages) * (1 + answers)
    return len(record.text if isinstance(record, RenderedText) else record.input_ids)
