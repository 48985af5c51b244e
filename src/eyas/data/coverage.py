"""What a prepared folder holds, in figures: lengths, supervised share, drops, coverage."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.data.prepared import SPLITS, read_manifest, read_samples

_QUANTILES = {"shortest": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}


@dataclass(frozen=True)
class Summary:
    """Shapes: lengths and supervised are int64 [number of samples], both splits."""

    manifest: dict[str, Any]
    lengths: np.ndarray
    supervised: np.ndarray

    def rows(self) -> list[tuple[str, str]]:
        """Return the figures with their names, for a table."""
        counts, drops = self.manifest["counts"], self.manifest["drops"]
        rows = [("rows read", f"{self.manifest['num_read']:,}")]
        for split in SPLITS:
            kinds = ("conversations", "samples", "tokens")
            numbers = ", ".join(f"{counts.get(f'{split}_{kind}', 0):,} {kind}" for kind in kinds)
            rows.append((split.replace("_", " "), numbers))
        if len(self.lengths):
            share = self.supervised.sum() / self.lengths.sum()
            rows.append(("supervised", f"{share:.1%} of the tokens ({self.supervised.sum():,})"))
            quantiles = np.quantile(self.lengths, list(_QUANTILES.values()), method="nearest")
            named = zip(_QUANTILES, quantiles, strict=True)
            rows.append(("tokens a sample", ", ".join(f"{name} {int(q):,}" for name, q in named)))
            held = ", ".join(
                f"{covered:.2%} at {int(size):,}" for size, covered in self.manifest["coverage"].items()
            )
            rows.append(("draft vocabulary covers", held))
        if counts.get("cut_conversations"):
            lost = f"{counts['cut_supervised_tokens']:,} supervised tokens of {counts['cut_conversations']:,}"
            rows.append(("cut to data.max_length", f"{lost} conversations lost"))
        for name, key in (("shape", "shapes"), ("warning", "warnings"), ("finish", "finish_reasons")):
            rows += [(f"{name} {what}", f"{n:,}") for what, n in self.manifest.get(key, {}).items()]
        for name, key in (("column", "unused_columns"), ("message key", "unused_message_keys")):
            unused = self.manifest.get(key, {})
            rows += [(f"{name} not used: {what}", f"{n:,}") for what, n in unused.items()]
        rows += [("no data, not read", path) for path in self.manifest.get("unused_files", ())]
        return rows + [(f"dropped {reason}", f"{n:,}") for reason, n in drops.items()]

    def length_bars(self) -> list[tuple[str, int]]:
        """Return (up to so many tokens, number of samples) in powers of two."""
        if not len(self.lengths):
            return []
        powers = np.ceil(np.log2(np.maximum(self.lengths, 1))).astype(int)
        low, high = int(powers.min()), int(powers.max())
        return [(f"{2**p:,}", int((powers == p).sum())) for p in range(low, high + 1)]

    def share_bars(self) -> list[tuple[str, int]]:
        """Return (supervised share, number of samples) in tenths."""
        if not len(self.lengths):
            return []
        tenths = np.minimum(self.supervised * 10 // self.lengths, 9)
        return [(f"{10 * t}-{10 * t + 10} %", int((tenths == t).sum())) for t in range(10)]


def summarize(folder: Path) -> Summary:
    """Read a prepared folder once and count.

    Raises: UserError when there is none.
    """
    manifest = read_manifest(folder)
    figures = [
        (len(sample), int(sample.loss_mask.sum()))
        for split in SPLITS
        for sample in read_samples(folder, split)
    ]
    lengths, supervised = np.asarray(figures, dtype=np.int64).reshape(-1, 2).T
    return Summary(manifest, lengths, supervised)
