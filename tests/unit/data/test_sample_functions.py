"""Samples made of turns, merged and cut: by their definitions, at every length."""

import numpy as np
import pytest

from eyas.data.samples import cut_samples, generated_turn, mask_ends, masked_sample, merge_turns
from eyas.types import TokenizedSample

EOS = {99}


def sample(ids: list[int], mask: str, cut: bool = False) -> TokenizedSample:
    """Return a sample; ``mask`` has an x for each token of the assistant."""
    return TokenizedSample("s", np.array(ids, np.int32), np.array([m == "x" for m in mask]), cut)


def text(found: TokenizedSample | None) -> tuple[list[int], str, bool] | None:
    if found is None:
        return None
    return found.input_ids.tolist(), "".join("x" if m else "." for m in found.loss_mask), found.cut


@pytest.mark.parametrize(
    ("spans", "cut", "mask"),
    [
        ([(2, 5)], False, "..xxx"),
        ([(1, 3), (4, 5)], False, ".xx.x"),
        ([(4, 5)], True, "....x"),
        ([(4, 5)], False, None),
        ([(1, 2)], True, None),
        ([(1, 2), (3, 4)], False, None),
        ([], True, None),
        ([(0, 2)], True, "xx..."),
    ],
)
def test_a_sample_without_a_supervised_row_is_none(
    spans: list[tuple[int, int]], cut: bool, mask: str | None
) -> None:
    found = text(masked_sample("s", [1, 2, 3, 4, 5], spans, cut))
    assert found == (None if mask is None else ([1, 2, 3, 4, 5], mask, cut))


def test_a_generated_turn_is_its_prompt_and_the_answer() -> None:
    assert text(generated_turn("s", [1, 2], [3, 4], False)) == ([1, 2, 3, 4], "..xx", False)
    assert text(generated_turn("s", [1, 2], [3], True)) == ([1, 2, 3], "..x", True)
    assert generated_turn("s", [1, 2], [3], False) is None
    assert generated_turn("s", [1, 2], [], True) is None


def test_a_turn_is_merged_where_the_next_one_begins_with_exactly_its_tokens() -> None:
    one, two = sample([1, 2, 3], ".xx"), sample([1, 2, 3, 4, 5, 6], "....xx", cut=True)
    assert list(map(text, merge_turns([one, two]))) == [([1, 2, 3, 4, 5, 6], ".xx.xx", True)]
    other = sample([1, 2, 9, 4, 5, 6], "....xx")
    assert list(map(text, merge_turns([one, other]))) == [text(one), text(other)]
    shorter = sample([1, 2], "xx")
    assert list(map(text, merge_turns([one, shorter]))) == [text(one), text(shorter)]
    equal = sample([1, 2, 3], "xx.")
    assert list(map(text, merge_turns([one, equal]))) == [([1, 2, 3], "xxx", False)]
    assert merge_turns([]) == []


@pytest.mark.parametrize("length", range(1, 12))
@pytest.mark.parametrize("cut", [False, True])
def test_a_sample_is_cut_to_any_length_as_defined(length: int, cut: bool) -> None:
    mask = "..xxx..xxx"
    whole = sample(list(range(10)), mask, cut)
    found = [text(s) for s in cut_samples("c", [whole], length)]
    if length >= 10:
        assert found == [(list(range(10)), mask, cut)]
        return
    # The answer goes on exactly where its next token is the assistant's too.
    goes_on = mask[length - 1 : length + 1] == "xx"
    kept = mask[:length]
    expected = [(list(range(length)), kept, goes_on)] if goes_on or "xx" in kept else []
    assert found == expected


def test_a_sample_that_is_cut_right_behind_an_answer_does_not_go_on() -> None:
    (found,) = cut_samples("c", [sample([1, 2, 3, 4, 5], ".xx.x")], 3)
    assert text(found) == ([1, 2, 3], ".xx", False)


def test_samples_of_one_conversation_have_names_of_their_own() -> None:
    one = sample([1, 2, 3], ".xx")
    assert [s.sample_id for s in cut_samples("c", [one], 9)] == ["c"]
    assert [s.sample_id for s in cut_samples("c", [one, one], 9)] == ["c#0", "c#1"]
    lost = sample([1, 2, 3, 4], "..xx")
    assert [s.sample_id for s in cut_samples("c", [lost, one], 2)] == ["c#1"]


@pytest.mark.parametrize(
    ("ids", "mask", "found"),
    [
        ([1, 2, 99, 4], ".xx.", {"at": 1}),
        ([1, 2, 3, 99, 5], ".xx..", {"before": 1}),
        ([1, 99, 3, 4], ".xx.", {"behind": 1}),
        ([1, 2, 3, 4], ".xx.", {"elsewhere": 1}),
        ([1, 2, 99], ".xx", {}),
        ([99, 1, 2, 3], "x.xx", {"at": 1}),
        ([1, 99, 3, 4], "x.xx", {"before": 1}),
        ([1, 99, 99, 4, 99, 6, 7, 8], ".xx.x.x.", {"at": 2, "elsewhere": 1}),
        ([99, 99, 99, 4], ".xx.", {"at": 1}),
    ],
)
def test_masked_spans_are_counted_by_where_they_end(ids: list[int], mask: str, found: dict[str, int]) -> None:
    assert mask_ends(sample(ids, mask, cut=True), EOS) == found
