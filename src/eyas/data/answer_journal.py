"""Answers on disk, one line each, so that an interrupted regeneration resumes where it stopped."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eyas.errors import ContractError, EyasError
from eyas.files import atomic_file, seal, unseal
from eyas.types import Completion


class AnswerJournal:
    """An append-only file of completions, each with a hash of its prompt; memory holds only their offsets.

    An answer belongs to the token ids that it was given to. A template that renders the date, or one that was
    edited, gives other ids under the same prompt id: the answer is then not used, and counted.
    """

    def __init__(self, path: Path) -> None:
        """Open the journal; lines that are not what was written are cut out, to be answered again."""
        self.num_other_prompts = 0
        self._offsets: dict[str, int] = {}
        if path.is_file() and any(_parse(line) is None for line in _lines(path)):
            with atomic_file(path) as temporary, temporary.open("wb") as f:
                f.writelines(line for line in _lines(path) if _parse(line) is not None)
        self._file = path.open("a+b")
        self._end = 0
        for line in _lines(path):
            entry = _parse(line)
            assert entry is not None
            # Of several answers under one id the last was given to the newest prompt.
            self._offsets[entry.completion.prompt_id] = self._end
            self._end += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def holds(self, prompt_id: str, token_ids: Sequence[int]) -> bool:
        """Return whether this prompt was answered; an answer to other ids under its name is counted."""
        if prompt_id not in self._offsets:
            return False
        if self._entry(prompt_id).prompt_hash == _hash_of(token_ids):
            return True
        self.num_other_prompts += 1
        return False

    def add(self, completion: Completion, token_ids: Sequence[int]) -> None:
        """Append the answer to a prompt's ``token_ids``; the operating system has it when this returns."""
        prompt_hash = _hash_of(token_ids)
        known = completion.prompt_id in self._offsets and self._entry(completion.prompt_id)
        if known and known.prompt_hash == prompt_hash:
            raise EyasError(f"{completion.prompt_id} was answered twice")
        value = {**dataclasses.asdict(completion), "prompt_hash": prompt_hash}
        line = json.dumps(seal(value)).encode() + b"\n"
        self._file.seek(0, 2)
        self._file.write(line)
        self._file.flush()
        self._offsets[completion.prompt_id] = self._end
        self._end += len(line)

    def read(self, prompt_id: str) -> Completion:
        return self._entry(prompt_id).completion

    def close(self) -> None:
        self._file.close()

    def _entry(self, prompt_id: str) -> "_Entry":
        self._file.seek(self._offsets[prompt_id])
        entry = _parse(self._file.readline())
        if entry is None:
            raise ContractError(f"{self._file.name} has changed while it was read")
        return entry


@dataclasses.dataclass(frozen=True)
class _Entry:
    """``prompt_hash`` is None in lines of eyas 0.1, which fit no prompt."""

    completion: Completion
    prompt_hash: str | None


def _hash_of(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes()).hexdigest()[:16]


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as f:
        yield from f


def _parse(line: bytes) -> _Entry | None:
    """Return a line's answer, or None for a line torn by a crash or changed since."""
    if not line.endswith(b"\n"):
        return None
    try:
        value: dict[str, Any] = unseal(json.loads(line))
        prompt_hash = value.pop("prompt_hash", None)
        ids = tuple(int(i) for i in value["token_ids"])
        return _Entry(Completion(**{**value, "token_ids": ids}), prompt_hash)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
