"""What prepare tells a person about the data that it wrote."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_REASONS_SHOWN = 5
_NAMES_SHOWN = 100


def summary_lines(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the summary; what was in the sources and was not used is always among them."""
    counts, drops = manifest["counts"], manifest["drops"]
    yield (
        f"prepare: {manifest['num_read']:,} rows read, "
        f"{counts.get('train_conversations', 0):,} conversations to train on, "
        f"{counts.get('held_out_conversations', 0):,} held out, {sum(drops.values()):,} dropped"
    )
    yield f"  shapes: {_counted(manifest['shapes'])}"
    yield from unused_lines(manifest)
    for reason, number in list(drops.items())[:_REASONS_SHOWN]:
        yield f"  dropped: {reason} ({number:,})"
    if len(drops) > _REASONS_SHOWN:
        yield f"  dropped for {len(drops) - _REASONS_SHOWN} further reasons: see manifest.json"
    for warning, number in manifest["warnings"].items():
        yield f"  warning: {warning} in {number:,} conversations"
    if counts.get("cut_conversations"):
        yield (
            f"  cut to data.max_length: {counts['cut_conversations']:,} conversations, "
            f"{counts['cut_supervised_tokens']:,} supervised tokens lost"
        )
    if not counts.get("held_out_conversations"):
        yield (
            "  warning: nothing is held out for validation; "
            "raise data.validation_fraction or add conversations"
        )


def unused_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines on what the sources hold and nobody read; also of data that is refused."""
    yield f"  columns not used: {_counted(facts['unused_columns']) or 'none'}"
    if facts["unused_message_keys"]:
        yield f"  message keys not used: {_counted(facts['unused_message_keys'])}"
    if facts["unused_files"]:
        yield f"  no data, not read: {_named(facts['unused_files'])}"


def _counted(numbers: Mapping[str, int]) -> str:
    return _named([f"{name} ({n:,})" for name, n in numbers.items()])


def _named(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more:,} more in manifest.json" if more > 0 else "")
