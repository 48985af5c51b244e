"""Answers on disk, one line each, so that an interrupted regeneration goes on where it was."""

import dataclasses
import json
from pathlib import Path

from eyas.errors import EyasError
from eyas.types import Completion


class AnswerJournal:
    """An append-only file of completions; memory holds only where each one lies."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")
        self._offsets: dict[str, int] = {}
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):  # a line torn by a crash
                break
            self._offsets[json.loads(line)["prompt_id"]] = end
            end += len(line)
        self._file.truncate(end)
        self._end = end

    def __contains__(self, prompt_id: str) -> bool:
        return prompt_id in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, completion: Completion) -> None:
        """Append an answer; it is with the operating system when this returns."""
        if completion.prompt_id in self._offsets:
            raise EyasError(f"{completion.prompt_id} was answered twice")
        line = json.dumps(dataclasses.asdict(completion)).encode() + b"\n"
        self._file.seek(0, 2)
        self._file.write(line)
        self._file.flush()
        self._offsets[completion.prompt_id] = self._end
        self._end += len(line)

    def read(self, prompt_id: str) -> Completion:
        self._file.seek(self._offsets[prompt_id])
        value = json.loads(self._file.readline())
        return Completion(**{**value, "token_ids": tuple(value["token_ids"])})

    def close(self) -> None:
        self._file.close()
