"""Puts records on their side of the split."""

from collections.abc import Sequence

from eyas.data.dedup_and_split import hash_of, split_key
from eyas.data.prepared import PreparedWriter, Split
from eyas.data.records import Record
from eyas.types import Conversation, TokenizedSample

_FIRST_RECORDS = 256


class SplitWriter:
    """Writes records to the side that the hash of what they ask decides.

    So that a small data set has both sides, the first records wait for each other: where all of them
    would go to one side, the one with the most extreme hash goes to the other.
    """

    def __init__(self, writer: PreparedWriter, share: float, salt: str) -> None:
        self.writer, self.share, self.salt = writer, share, salt
        self._first: list[tuple[int, Record, Sequence[TokenizedSample]]] | None = []
        self._forced: dict[int, Split] = {}

    def add(self, record: Record, samples: Sequence[TokenizedSample]) -> None:
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

    def _write(self, split: Split, record: Record, samples: Sequence[TokenizedSample]) -> None:
        self.writer.counts[f"{split}_conversations"] += 1
        if isinstance(record, Conversation):
            self.writer.add_conversation(split, record)
        for sample in samples:
            self.writer.add_sample(split, sample)
