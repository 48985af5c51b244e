"""Which rows are the same, and on which side of the split each belongs; never by position."""

import hashlib
import json
import sqlite3

from eyas.data.records import Record, RenderedText
from eyas.errors import UserError
from eyas.types import Conversation


class SeenRows:
    """Remembers every id with a hash of what it said, on disk, so that memory stays small."""

    def __init__(self) -> None:
        # An empty name is a temporary database: sqlite keeps it in its cache, then in a file it removes.
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("CREATE TABLE seen (id TEXT PRIMARY KEY, said TEXT, place TEXT) WITHOUT ROWID")
        self._db.execute("BEGIN")

    def is_repeat(self, record: Record, said: str) -> bool:
        """Return whether a row of this id said the same before; remember it if not.

        Raises: UserError when the id was seen with another text, naming both places.
        """
        found = self._db.execute(
            "SELECT said, place FROM seen WHERE id = ?", (record.conversation_id,)
        ).fetchone()
        if found is None:
            self._db.execute(
                "INSERT INTO seen VALUES (?, ?, ?)", (record.conversation_id, said, record.source)
            )
            return False
        if found[0] != said:
            raise UserError(
                f"two rows have the id {record.conversation_id!r} and different text: "
                f"{found[1]} and {record.source}",
                hint="give each row an id of its own, or leave ids out",
            )
        return True

    def __enter__(self) -> "SeenRows":
        return self

    def __exit__(self, *error: object) -> None:
        self._db.close()


def split_key(record: Record) -> str:
    """Return what decides a record's side of the split: what comes before its first answer.

    Rows that ask the same thing, under whatever ids, stay together, so that no prompt leaks.
    """
    if isinstance(record, Conversation):
        messages = record.messages
        answers = (i for i, m in enumerate(messages) if m.role == "assistant" and i > 0)
        asked = messages[: next(answers, len(messages))]
        return json.dumps([m.for_template() for m in asked], sort_keys=True, ensure_ascii=False)
    return record.text if isinstance(record, RenderedText) else record.input_ids.tobytes().hex()


def below_share(key: str, share: float, salt: str) -> bool:
    """Decide by hash whether something belongs to a share: the same for ever, whatever its neighbours."""
    return hash_of(key, salt) < share * 2**64


def hash_of(key: str, salt: str) -> int:
    """Return a number below 2**64 that depends on ``key`` and ``salt`` alone."""
    digest = hashlib.sha256(f"{salt}:{key}".encode()).digest()
    return int.from_bytes(digest[:8])
