"""Rows that were tokenized before: token ids, and a mask under one of its names."""

from typing import Any

import numpy as np

from eyas.data.fields import BadRow, Fields
from eyas.data.records import TokenRow

# loss_mask (eyas), assistant_masks (transformers' return_assistant_tokens_mask, TRL), completion_mask (TRL).
MASK_KEYS = ("loss_mask", "assistant_masks", "assistant_mask", "assistant_tokens_mask", "completion_mask")
# What transformers' losses leave out.
_NO_LABEL = -100


def read_token_row(fields: Fields, row_id: str, place: str) -> TokenRow:
    """Read token ids with their mask, or with labels, which are the ids or -100.

    Raises: BadRow with the reason for which the row is dropped.
    """
    ids = fields.take("input_ids")
    masks = [fields.take(key) for key in MASK_KEYS if fields.has(key)]
    labels, attention = fields.take("labels"), fields.take("attention_mask")
    if not masks and labels is None:
        raise BadRow("missing_loss_mask")
    if not _all_integers(ids) or any(not _is_mask(mask) for mask in masks):
        raise BadRow("bad_shape")
    if labels is not None:
        masks.append(_mask_of(ids, labels))
    if any(len(mask) != len(ids) for mask in masks):
        raise BadRow("mask_length_mismatch")
    if any(not 0 <= i < 2**31 for i in ids):
        raise BadRow("token_id_out_of_range")
    if any(mask != masks[0] for mask in masks):
        raise BadRow("masks_disagree")
    if attention is not None and (not isinstance(attention, list) or attention != [1] * len(ids)):
        raise BadRow("attention_mask_hides_tokens")
    return TokenRow(row_id, np.asarray(ids, dtype=np.int32), np.asarray(masks[0], dtype=bool), place)


def _mask_of(ids: list[int], labels: Any) -> list[int]:
    if not _all_integers(labels):
        raise BadRow("bad_shape")
    if len(labels) != len(ids):
        raise BadRow("mask_length_mismatch")
    if any(label not in (_NO_LABEL, i) for i, label in zip(ids, labels, strict=True)):
        raise BadRow("labels_are_not_the_ids")
    return [int(label != _NO_LABEL) for label in labels]


def _is_mask(mask: Any) -> bool:
    return isinstance(mask, list) and all(m in (0, 1) for m in mask)


def _all_integers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in values)
