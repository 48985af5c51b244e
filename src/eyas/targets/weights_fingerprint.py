"""Identifies a target's weights by bytes of every tensor, without reading all of them.

A sample is taken of each tensor: 4 KiB at a position that its name decides. Of numbered experts, one in 64
of each layer is sampled. A fine-tune, a merged adapter or another quantisation changes almost every tensor
and is seen. What can escape: an edit of a few rows of one tensor, or of a few experts. ``full`` reads all.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import xxhash

from eyas.safetensors_io import Entry
from eyas.targets.weights import Weights

Way = Literal["sampled", "full"]

_SAMPLE_BYTES = 4096
_EXPERTS_A_SAMPLE = 64
_BLOCK_BYTES = 8 << 20
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
_ALL_EXPERTS = re.compile(
    r"(?:^|\.)experts\.(?!\d)"
)  # one tensor with all experts of a layer: [experts, ...]


def fingerprint_weights(weights: Weights, way: Way) -> str:
    """Return ``WAY-DIGITS``; it does not depend on how the tensors are spread over files.

    Raises: UserError when a file is missing, damaged or cannot be reached.
    """
    entries = weights.entries()
    digest = xxhash.xxh3_128()
    for name in sorted(entries):
        digest.update(f"{name}\0{entries[name].dtype}\0{entries[name].shape}\0".encode())
    pieces = list(_samples(entries) if way == "sampled" else _everything(entries))
    for data in weights.read_pieces(pieces):
        digest.update(data)
    return f"{way}-{digest.hexdigest()[:16]}"


def fingerprint_as(weights: Weights, recorded: str) -> str:
    """Return the fingerprint of ``weights`` made in the way that ``recorded`` was made."""
    way = recorded.partition("-")[0]
    if way == "sampled":
        return fingerprint_weights(weights, "sampled")
    return fingerprint_weights(weights, "full") if way == "full" else _fingerprint_of_0_1(weights)


def way_of(recorded: str) -> Way:
    """Return the setting target.fingerprint that made ``recorded``, or the default."""
    return "full" if recorded.startswith("full-") else "sampled"


def sampled_names(names: Iterable[str]) -> list[str]:
    """Return the tensors that are sampled: all but experts, and one in 64 experts of each layer."""
    chosen: list[str] = []
    experts: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        if match := _EXPERT.search(name):
            experts[name[: match.start(1)]][int(match.group(1))].append(name)
        else:
            chosen.append(name)
    for layer, numbers in experts.items():
        in_order = sorted(numbers)
        first = _number(layer) % min(_EXPERTS_A_SAMPLE, len(in_order))
        for number in in_order[first::_EXPERTS_A_SAMPLE]:
            chosen += numbers[number]
    return sorted(chosen)


def _samples(entries: Mapping[str, Entry]) -> Iterator[tuple[str, int, int]]:
    for name in sampled_names(entries):
        entry = entries[name]
        size = entry.stop - entry.start
        # All experts of a layer in one tensor: (experts, rows, columns).
        is_stacked = _ALL_EXPERTS.search(name) and len(entry.shape) == 3
        num_experts = entry.shape[0] if is_stacked else 1
        for number in range(-(-num_experts // _EXPERTS_A_SAMPLE)):
            start = _number(f"{name}\0{number}") % (max(0, size - _SAMPLE_BYTES) + 1)
            yield name, start, min(size, start + _SAMPLE_BYTES)


def _everything(entries: Mapping[str, Entry]) -> Iterator[tuple[str, int, int]]:
    for name in sorted(entries):
        size = entries[name].stop - entries[name].start
        for start in range(0, size, _BLOCK_BYTES):
            yield name, start, min(size, start + _BLOCK_BYTES)


def _number(text: str) -> int:
    return xxhash.xxh3_64(text.encode()).intdigest()


def _fingerprint_of_0_1(weights: Weights) -> str:
    """Return what eyas 0.1 recorded: sizes and ends of the files. It misses most fine-tunes."""
    digest, files = hashlib.sha256(), weights.files
    for name in weights.file_names:
        size = files.size(name) or 0
        digest.update(f"{name}\0{size}\0".encode() + files.read(name, 0, min(size, 1 << 16)))
        digest.update(files.read(name, max(0, size - (1 << 16)), size))
    return digest.hexdigest()[:16]
