"""Single tensors out of a model's safetensors files, by byte range, without loading the model.

Source: the safetensors format: eight bytes of header length, a JSON header with each tensor's type,
shape and place, then the tensors.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch

from eyas.errors import UserError
from eyas.safetensors_io import DTYPES, Entry, parse_header
from eyas.targets.files import Files, LocalFiles, files_of

INDEX = "model.safetensors.index.json"
# Where the text model's tensors lie: text models, wrappers of several modalities, old and new.
PREFIXES = ("model.", "language_model.model.", "model.language_model.")
HEADS = ("lm_head", "language_model.lm_head", "model.lm_head")
_AGAIN = "download the model again"
_MAX_HEADER_BYTES = 1 << 28
_FIRST_READ = 1 << 18


class Weights:
    """The tensors of one model, read one at a time; nothing but headers is kept in memory."""

    def __init__(self, folder: Path) -> None:
        self.files: Files = files_of(folder)
        self._headers: dict[str, dict[str, Entry]] = {}

    @cached_property
    def file_of(self) -> Mapping[str, str]:
        """The file that holds each tensor: from the index where there is one, else from the headers.

        Raises: UserError when there are no weights, or a numbered file is missing.
        """
        if (size := self.files.size(INDEX)) is not None:
            try:
                index: dict[str, str] = json.loads(self.files.read(INDEX, 0, size))["weight_map"]
                named = set(index.values())
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise UserError(f"{self.files.where}/{INDEX} is damaged", hint=_AGAIN) from None
            for file in named:
                if not isinstance(file, str) or Path(file).name != file:
                    raise UserError(
                        f"{self.files.where}/{INDEX} names {file!r}, which is no file of that folder",
                        hint=_AGAIN,
                    )
            return index
        found = self.files.weight_files()
        # Some models come a second time in their maker's own format.
        found = [n for n in found if not n.startswith("consolidated")] or found
        if "model.safetensors" in found:
            found = ["model.safetensors"]
        if not found:
            raise UserError(
                f"{self.files.where} holds no *.safetensors weights",
                hint="convert or download the model in safetensors format",
            )
        if missing := _missing_numbers(found):
            raise UserError(f"{self.files.where} lacks {missing[0]}", hint=_AGAIN)
        return {name: file for file in found for name in self.header(file)}

    @property
    def file_names(self) -> list[str]:
        return sorted(set(self.file_of.values()))

    @property
    def num_bytes(self) -> int:
        """The size of all files together; no values are read."""
        return sum(self.files.size(name) or 0 for name in self.file_names)

    @cached_property
    def prefix(self) -> str:
        """What the text model's tensor names start with.

        Raises: UserError when no known name of an embedding is there, or more than one.
        """
        found = [p for p in PREFIXES if any(n.startswith(f"{p}embed_tokens.") for n in self.file_of)]
        if len(found) != 1:
            raise UserError(
                f"{self.files.where} holds {len(found)} embeddings under the names known to eyas "
                f"({', '.join(f'{p}embed_tokens' for p in PREFIXES)})",
                hint="is this a whole checkpoint of the target, and not an adapter or one shard?",
            )
        return found[0]

    @cached_property
    def head(self) -> str | None:
        """Name of the head, without its ending; None when the checkpoint has none (it is tied)."""
        return next((h for h in HEADS if any(n.startswith(f"{h}.") for n in self.file_of)), None)

    def check_complete(self) -> None:
        """Raise UserError naming the first file that is missing or shorter than its header says."""
        for file, size in zip(self.file_names, self.files.map(self.files.size, self.file_names), strict=True):
            if size is None:
                held = sum(f == file for f in self.file_of.values())
                raise UserError(
                    f"{self.files.where} lacks {file}, which holds {held} of the target's tensors",
                    hint=_AGAIN,
                )
        if isinstance(self.files, LocalFiles):  # elsewhere it would be a request a file
            for file in self.file_names:
                self.header(file)

    def entries(self) -> dict[str, Entry]:
        """Return the place of every tensor. Raises: UserError as ``entry`` does."""
        list(self.files.map(self.header, self.file_names))
        return {name: self.entry(name) for name in self.file_of}

    def read_pieces(self, pieces: Iterable[tuple[str, int, int]]) -> Iterator[bytearray]:
        """Yield bytes ``start`` to ``stop`` of a tensor for each (name, start, stop), in order.

        Raises: UserError when a file ends too early.
        """
        return self.files.map(self._read_piece, pieces)

    def _read_piece(self, piece: tuple[str, int, int]) -> bytearray:
        name, start, stop = piece
        begin, file = self.entry(name).start, self.file_of[name]
        data = self.files.read(file, begin + start, begin + stop)
        if len(data) != stop - start:
            raise self._damaged(file, "it ends too early")
        return data

    def entry(self, name: str) -> Entry:
        """Return a tensor's place. Raises: UserError when the tensor or its file is missing or damaged."""
        if name not in self.file_of:
            raise UserError(
                f"{self.files.where} holds no tensor {name}", hint="is this folder the target you meant?"
            )
        header = self.header(self.file_of[name], name)
        if name not in header:
            raise UserError(
                f"{self.files.where}/{self.file_of[name]} lacks {name}, which the index puts there",
                hint=_AGAIN,
            )
        return header[name]

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor. Raises: UserError when the tensor or its file is missing or damaged."""
        entry = self.entry(name)
        if entry.dtype not in DTYPES:
            raise UserError(f"{name} of {self.files.where} is stored as {entry.dtype}, unknown to eyas")
        file = self.file_of[name]
        data = self.files.read(file, entry.start, entry.stop)
        if len(data) != entry.stop - entry.start:
            raise self._damaged(file, "it ends too early")
        if not data:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).reshape(entry.shape)

    def read_if_there(self, name: str) -> torch.Tensor | None:
        return self.read(name) if name in self.file_of else None

    def header(self, file: str, wanted: str | None = None) -> dict[str, Entry]:
        """Return where the tensors of a file lie; kept, so that a file is asked once."""
        if file not in self._headers:
            self._headers[file] = self._read_header(file, wanted)
        return self._headers[file]

    def _read_header(self, file: str, wanted: str | None) -> dict[str, Entry]:
        size = self.files.size(file)
        if size is None:
            holds = f", which holds {wanted}" if wanted else ""
            raise UserError(f"{self.files.where} lacks {file}{holds}", hint=_AGAIN)
        begin = self.files.read(file, 0, min(size, _FIRST_READ))  # most headers in one request
        length = int.from_bytes(begin[:8], "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
            raise self._damaged(file, "its header is not that of a safetensors file")
        try:
            rest = self.files.read(file, len(begin), 8 + length) if 8 + length > len(begin) else b""
            entries, _ = parse_header(begin[8 : 8 + length] + rest)
        except ValueError:
            raise self._damaged(file, "its header cannot be read") from None
        end = max((e.stop for e in entries.values()), default=8 + length)
        if end != size:
            raise self._damaged(file, f"it has {size} bytes, its header says {end}")
        return entries

    def _damaged(self, file: str, why: str) -> UserError:
        return UserError(f"{self.files.where}/{file} is damaged: {why}", hint=_AGAIN)


def _missing_numbers(files: Iterable[str]) -> list[str]:
    """Return the files that numbers as in ``model-00001-of-00064.safetensors`` promise, and are not there."""
    names = set(files)
    missing = []
    for name in sorted(names):
        if match := re.fullmatch(r"(.*?)(\d+)-of-(\d+)(\.safetensors)", name):
            head, number, count, tail = match.groups()
            all_names = (f"{head}{i:0{len(number)}d}-of-{count}{tail}" for i in range(1, int(count) + 1))
            missing += [n for n in all_names if n not in names]
    return missing
