"""Whether what is left of the rows is worth going on with."""

from pathlib import Path

from eyas.config.schema import DataSettings
from eyas.data.prepared import PreparedWriter
from eyas.data.sources import BROKEN
from eyas.data.tally import Tally
from eyas.errors import UserError

_REASONS_NAMED = 3
_ABOUT_FLAGS = (
    "weight_not_0_or_1",
    "unclear_training_flag",
    "partly_trained_turn",
    "trained_role",
    "training_flags_disagree",
)


def check_enough(writer: PreparedWriter, tally: Tally, data: DataSettings, drops_file: Path) -> None:
    """Refuse data of which too much was dropped; every row that was read is kept or dropped.

    Raises: UserError with the most frequent reasons.
    """
    num_dropped = sum(writer.drops.values())
    kept = writer.counts["train_conversations"] + writer.counts["held_out_conversations"]
    assert kept + num_dropped == tally.num_read
    common = writer.drops.most_common(_REASONS_NAMED)
    why = "".join(f"; {reason}: {n}" for reason, n in common)
    if writer.drops[BROKEN] and not data.skip_broken_lines:
        places = ", ".join(tally.broken_places)
        more = " and more" if writer.drops[BROKEN] > len(tally.broken_places) else ""
        num = writer.drops[BROKEN]
        raise UserError(
            f"{num} broken line{'s' if num > 1 else ''}: {places}{more}",
            hint="fix them, or set data.skip_broken_lines=true to drop them",
        )
    if not tally.num_read:
        raise UserError(
            "the files of data.sources hold no rows", hint="docs/data.md shows what a row may look like"
        )
    hint = f"{drops_file} names every row; docs/data.md explains the reasons"
    if any(reason.split(":")[0] in _ABOUT_FLAGS for reason, _ in common):
        hint += "; data.ignore_keys=[KEY] leaves a key out that is no training flag"
    if not kept:
        raise UserError(
            f"nothing is left to train on: {tally.num_read} rows read, all dropped{why}", hint=hint
        )
    if num_dropped > data.max_drop_share * tally.num_read:
        raise UserError(
            f"{num_dropped} of {tally.num_read} rows were dropped, more than "
            f"data.max_drop_share={data.max_drop_share}{why}",
            hint=f"{hint}; fix the data, or raise data.max_drop_share",
        )
