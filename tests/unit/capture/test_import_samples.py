"""Samples prepared elsewhere: their masks are read under every name, and nothing is ignored in silence."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eyas.capture.import_samples import _sample
from eyas.data.sources import Drop
from eyas.types import TokenizedSample


def _read(**more: Any) -> tuple[TokenizedSample | Drop, Counter[str]]:
    unused: Counter[str] = Counter()
    return _sample(Path("data.jsonl"), 3, {"id": "a", "input_ids": [4, 5, 6], **more}, 64, unused), unused


@pytest.mark.parametrize(
    "mask", [{"labels": [-100, 5, 6]}, {"assistant_masks": [0, 1, 1]}, {"loss_mask": [0, 1, 1]}]
)
def test_labels_and_masks_of_other_names_are_the_mask(mask: dict[str, Any]) -> None:
    sample, unused = _read(**mask, attention_mask=[1, 1, 1])
    assert isinstance(sample, TokenizedSample)
    assert sample.loss_mask.tolist() == [False, True, True]
    assert not unused


def test_without_a_mask_every_token_is_trained_and_other_columns_are_counted() -> None:
    sample, unused = _read(length=3)
    assert isinstance(sample, TokenizedSample)
    assert sample.loss_mask.all()
    assert unused == {"length": 1}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"weight": 0}, "marked_not_trained"),
        ({"weight": 0.5}, "weight_not_0_or_1:weight"),
        ({"attention_mask": [0, 1, 1]}, "attention_mask_hides_tokens"),
        ({"loss_mask": [0, 1, 1], "labels": [-100, -100, 6]}, "masks_disagree"),
    ],
)
def test_a_sample_that_must_not_be_trained_as_it_stands_is_dropped(more: Any, reason: str) -> None:
    assert _read(**more)[0] == Drop("a", "data.jsonl:3", reason)
