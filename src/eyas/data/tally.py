"""What prepare counts besides the rows that it keeps and drops."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from eyas.data.row_formats import Parsed

_PLACES_NAMED = 5
# Keys that are data, such as one name for each row, must not fill the memory.
_KEYS_NAMED = 10_000
_KEY_CHARACTERS = 100
FURTHER_KEYS = "(further keys)"


@dataclass
class Tally:
    """``unused_columns`` counts rows, ``unused_message_keys`` messages; ``unused_files`` are paths."""

    num_read: int = 0
    num_left_out: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    warnings: Counter[str] = field(default_factory=Counter)
    unused_columns: Counter[str] = field(default_factory=Counter)
    unused_message_keys: Counter[str] = field(default_factory=Counter)
    unused_files: list[str] = field(default_factory=list)
    broken_places: list[str] = field(default_factory=list)

    def add_unused(self, parsed: Parsed) -> None:
        """Count the keys of a row that nobody read."""
        _count(self.unused_columns, parsed.unused_columns)
        _count(self.unused_message_keys, parsed.unused_message_keys)

    def add_broken(self, place: str) -> None:
        if len(self.broken_places) < _PLACES_NAMED:
            self.broken_places.append(place)

    def facts(self) -> dict[str, Any]:
        """Return what the manifest holds of it."""
        return {
            "num_read": self.num_read,
            "num_left_out_by_weight": self.num_left_out,
            "shapes": dict(self.shapes),
            "warnings": dict(self.warnings),
            "unused_columns": dict(self.unused_columns.most_common()),
            "unused_message_keys": dict(self.unused_message_keys.most_common()),
            "unused_files": [_shown(name) for name in self.unused_files],
        }


def _count(counter: Counter[str], keys: Iterable[str]) -> None:
    for key in keys:
        name = _shown(key)
        counter[name if name in counter or len(counter) < _KEYS_NAMED else FURTHER_KEYS] += 1


def _shown(key: str) -> str:
    """Return a key as it can be printed and written."""
    if not key.isprintable():
        key = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in key)
    return key if len(key) <= _KEY_CHARACTERS else key[:_KEY_CHARACTERS] + "…"
