"""A mapping that knows which of its keys were read, so that the others can be named."""

from collections.abc import Collection, Mapping
from typing import Any


class BadRow(ValueError):
    """The row cannot be used; its text is the drop reason."""


class Fields:
    """The keys and values of a row, a message or a content part; keys in ``ignored`` do not exist for it."""

    __slots__ = ("_read", "_values")

    def __init__(self, values: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
        self._values = {k: v for k, v in values.items() if k not in ignored} if ignored else values
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def has(self, *keys: str) -> bool:
        """Return whether one of the keys has a value; none counts as read by that."""
        return any(self._values.get(key) is not None for key in keys)

    def peek(self, key: str) -> Any:
        """Return a value; its key does not count as read."""
        return self._values.get(key)

    def is_unread(self, key: str) -> bool:
        return key in self._values and key not in self._read

    def take(self, *keys: str) -> Any:
        """Read the first of the keys that has a value; the keys after it stay unread."""
        for key in keys:
            if key in self._values:
                self._read.add(key)
                if self._values[key] is not None:
                    return self._values[key]
        return None

    def take_filled(self, *keys: str) -> Any:
        """Read the first of the keys that is neither null nor empty; the keys after it stay unread."""
        for key in keys:
            if key in self._values:
                self._read.add(key)
                if self._values[key]:
                    return self._values[key]
        return None

    def unread(self) -> list[str]:
        """Return the keys that nobody read, in the order of the mapping."""
        return [key for key in self._values if key not in self._read]
