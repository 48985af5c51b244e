"""Keys that say what is learnt: known ones are obeyed, and what cannot be obeyed refuses the row.

Sources: weight of 0 or 1 (OpenAI, Together, Mistral, Fireworks), train and train_detail (axolotl),
loss (XTuner, ms-swift), masked (torchtune), step_loss_mask (slime), mask with the name of a role (NeMo).
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from eyas.data.fields import BadRow, Fields
from eyas.data.roles import role_of

Kind = Literal["trained", "not_trained", "part", "left_out", "mask", "unclear"]

# Names are compared without case, underscores and hyphens.
_KINDS: dict[Kind, set[str]] = {
    # A true value trains.
    "trained": {
        "weight", "train", "trained", "trainable", "training", "istrained", "istrainable", "totrain",
        "shouldtrain", "trainon", "trainonturn", "trainonthis", "trainmask", "trainflag",
        "trainweight", "trainingweight", "turnweight", "messageweight", "rowweight", "sampleweight",
        "exampleweight", "instanceweight", "importanceweight", "loss", "lossmask", "lossweight",
        "lossscale", "lossmultiplier", "steplossmask", "hasloss", "useloss", "computeloss",
        "calculateloss", "calcloss", "withloss", "inloss", "supervise", "supervised", "issupervised",
        "learn", "learnable", "tolearn",
    },
    # A true value does not train.
    "not_trained": {
        "masked", "ismasked", "lossmasked", "maskloss", "maskout", "maskedout", "noloss", "skiploss",
        "ignoreloss", "ignoreinloss", "nottrain", "notrain", "nottrained", "notrained", "untrained",
        "donttrain", "donottrain", "skiptrain", "skiptraining", "ignoretrain", "ignoretraining",
        "ignoreintraining", "excludefromtraining", "excludefromloss", "unsupervised",
    },
    # Offsets or segments of one turn.
    "part": {
        "traindetail", "traindetails", "trainingdetail", "trainspans", "trainsegments", "lossspans",
    },
    # Out of the training or out of the context; a false value changes nothing.
    "left_out": {
        "ignore", "ignored", "skip", "skipped", "exclude", "excluded",
    },
    # Of the trained tokens in one project, of the others in the next; a role's name is clear.
    "mask": {
        "mask",
    },
}  # fmt: skip
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
_ABOUT_TRAINING = {
    "train", "trained", "trainable", "training", "untrained", "loss", "losses", "mask", "masks", "masked",
    "masking", "unmask", "weight", "weights", "weighted", "weighting", "supervise", "supervised",
    "supervision", "learn", "learned",
}  # fmt: skip
_TRUE, _FALSE = ("true", "yes", "1", "1.0"), ("false", "no", "0", "0.0")


def says_trained(fields: Fields, role_map: Mapping[str, str]) -> bool | None:
    """Return what the unread keys say about training, and count those as read; None when they say nothing.

    Raises: BadRow for a flag that cannot be obeyed, such as a weight of 0.5.
    """
    answers = set()
    for key in fields.unread():
        kind = _kind(key)
        value = fields.peek(key)
        if kind is None or value is None or value in ("", [], {}):
            continue
        answers.add(_answer(kind, key, value, role_map))
        # Text in a column whose name only resembles a flag, such as training_source, says nothing.
        if not (kind == "unclear" and isinstance(value, str)):
            fields.take(key)
    answers.discard(None)
    if len(answers) > 1:
        raise BadRow("training_flags_disagree")
    return answers.pop() if answers else None


@lru_cache(maxsize=4096)
def _kind(key: str) -> Kind | None:
    known = _KIND_OF.get(re.sub(r"[\W_]", "", key).lower())
    if known is not None:
        return known
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", key).lower())
    return None if _ABOUT_TRAINING.isdisjoint(words) else "unclear"


def _answer(kind: Kind, key: str, value: Any, role_map: Mapping[str, str]) -> bool | None:
    if kind == "part":
        raise BadRow(f"partly_trained_turn:{key}")
    if kind == "trained":
        return _as_bool(key, value)
    if kind == "not_trained":
        return not _as_bool(key, value)
    if kind == "left_out" and not _as_bool(key, value):
        return None
    if isinstance(value, str):
        if kind == "unclear":
            return None
        if kind == "mask" and role_of(value, role_map) in ("user", "system", "tool", "developer"):
            return None  # these are never trained
    raise BadRow(f"unclear_training_flag:{key}")


def _as_bool(key: str, value: Any) -> bool:
    if isinstance(value, str) and value.strip().lower() in _TRUE + _FALSE:
        return value.strip().lower() in _TRUE
    if isinstance(value, int | float):
        if value in (0, 1):
            return bool(value)
        raise BadRow(f"weight_not_0_or_1:{key}")
    raise BadRow(f"unclear_training_flag:{key}")
