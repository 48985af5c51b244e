"""How large a target is, from the headers of its files alone."""

from dataclasses import dataclass
from pathlib import Path

from eyas.targets.weights import Entry, Weights

# Endings of what quantisation adds beside the values.
_NOT_VALUES = (
    "_scale",
    "_scale_inv",
    "_scale_2",
    "_zero_point",
    "_shape",
    "_g_idx",
    "_global_scale",
    ".scales",
    ".qzeros",
    ".g_idx",
    "_scales",
)


@dataclass(frozen=True)
class Size:
    """Units: num_parameters counts values as they were before quantisation; the others are bytes.

    head_bytes is what a trainer reads: embedding, final norm and head.
    """

    num_parameters: int
    weight_bytes: int
    head_bytes: int


def size_of(folder: Path) -> Size:
    """Measure the target in ``folder`` (or whose weights lie elsewhere); no values are read.

    Raises: UserError when a file is missing or damaged.
    """
    weights = Weights(folder)
    entries = {name: entry for file in weights.file_names for name, entry in weights.header(file).items()}
    parts = (f"{weights.prefix}embed_tokens.", f"{weights.prefix}norm.", f"{weights.head}.")
    return Size(
        num_parameters=sum(_num_values(name, entry) for name, entry in entries.items()),
        weight_bytes=weight_bytes(weights),
        head_bytes=sum(e.stop - e.start for name, e in entries.items() if name.startswith(parts)),
    )


def weight_bytes(weights: Weights) -> int:
    """Return the size of all files together."""
    return sum(weights.files.size(name) or 0 for name in weights.file_names)


def _num_values(name: str, entry: Entry) -> int:
    if name.endswith(_NOT_VALUES):
        return 0
    if name.endswith((".weight_packed", ".qweight")) and entry.dtype == "I32":
        return entry.num_elements * 8  # four bits a value
    if entry.dtype == "U8" and name.endswith((".weight", ".weight_packed", "_blocks")):
        return entry.num_elements * 2
    return entry.num_elements
