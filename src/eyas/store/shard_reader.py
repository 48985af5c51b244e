"""One shard that has been verified, memory-mapped."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from eyas.errors import ContractError
from eyas.store import fp8
from eyas.store.manifest import FORMAT_VERSION
from eyas.types import HiddenStates, TokenizedSample


class OpenShard:
    """Reads samples of one shard file; ``dtype`` is the target's, also where the file holds fp8.

    Raises: SafetensorError, KeyError, ValueError, TypeError, IndexError or ContractError for a file that
    is no shard.
    """

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._file = safe_open(path, framework="pt")
        self._dtype = dtype
        facts = json.loads((self._file.metadata() or {})["eyas"])
        if facts["format_version"] != FORMAT_VERSION:
            raise ContractError(f"shard format {facts['format_version']}, this eyas reads {FORMAT_VERSION}")
        self.target = facts["target"]
        self.sample_ids: list[str] = facts["sample_ids"]
        self._input_ids = self._file.get_tensor("input_ids").numpy()
        self._loss_mask = self._file.get_tensor("loss_mask").numpy()
        self._cut = self._file.get_tensor("cut").tolist()
        self._offsets = self._file.get_tensor("offsets").tolist()
        self._aux = self._file.get_slice("aux")
        self._last = self._file.get_slice("last")
        self._scales = (
            (self._file.get_slice("aux_scale"), self._file.get_slice("last_scale"))
            if "aux_scale" in set(self._file.keys())
            else None
        )
        self.samples = [self._sample(i) for i in range(len(self.sample_ids))]
        self._rows = np.cumsum([0, *(int(s.supervised.sum()) for s in self.samples)]).tolist()
        shapes = self._aux.get_shape()[0], self._last.get_shape()[0]
        if shapes != (self._offsets[-1], self._rows[-1]):
            raise ContractError(
                f"{shapes} rows of aux and last states for {self._offsets[-1]} tokens, "
                f"{self._rows[-1]} of them supervised"
            )

    def lengths(self) -> list[int]:
        return [len(s) for s in self.samples]

    def read(self, index: int) -> HiddenStates:
        tokens = slice(self._offsets[index], self._offsets[index + 1])
        rows = slice(self._rows[index], self._rows[index + 1])
        aux, last = self._aux[tokens], self._last[rows]
        if self._scales is not None:
            aux_scale, last_scale = self._scales
            aux = fp8.decode(aux, aux_scale[tokens], self._dtype)
            last = fp8.decode(last, last_scale[rows], self._dtype)
        return HiddenStates(self.samples[index], aux, last)

    def _sample(self, index: int) -> TokenizedSample:
        start, end = self._offsets[index], self._offsets[index + 1]
        return TokenizedSample(
            self.sample_ids[index],
            self._input_ids[start:end],
            self._loss_mask[start:end],
            self._cut[index],
        )
