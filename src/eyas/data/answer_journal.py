"""Answers on disk, one line each, so that an interrupted regeneration goes on where it was."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from eyas.errors import ContractError, EyasError
from eyas.files import atomic_file, seal, unseal
from eyas.types import Completion


class AnswerJournal:
    """An append-only file of completions; memory holds only where each one lies."""

    def __init__(self, path: Path) -> None:
        """Open the journal; lines that are not what was written are cut out, to be answered again."""
        self._offsets: dict[str, int] = {}
        if path.is_file() and any(_parse(line) is None for line in _lines(path)):
            with atomic_file(path) as beside, beside.open("wb") as f:
                f.writelines(line for line in _lines(path) if _parse(line) is not None)
        self._file = path.open("a+b")
        self._end = 0
        for line in _lines(path):
            completion = _parse(line)
            assert completion is not None
            self._offsets[completion.prompt_id] = self._end
            self._end += len(line)

    def __contains__(self, prompt_id: str) -> bool:
        return prompt_id in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, completion: Completion) -> None:
        """Append an answer; it is with the operating system when this returns."""
        if completion.prompt_id in self._offsets:
            raise EyasError(f"{completion.prompt_id} was answered twice")
        line = json.dumps(seal(dataclasses.asdict(completion))).encode() + b"\n"
        self._file.seek(0, 2)
        self._file.write(line)
        self._file.flush()
        self._offsets[completion.prompt_id] = self._end
        self._end += len(line)

    def read(self, prompt_id: str) -> Completion:
        self._file.seek(self._offsets[prompt_id])
        completion = _parse(self._file.readline())
        if completion is None:
            raise ContractError(f"{self._file.name} has changed while it was read")
        return completion

    def close(self) -> None:
        self._file.close()


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as f:
        yield from f


def _parse(line: bytes) -> Completion | None:
    """Return a line's answer, or None for a line torn by a crash or changed since."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = unseal(json.loads(line))
        return Completion(**{**value, "token_ids": tuple(int(i) for i in value["token_ids"])})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
