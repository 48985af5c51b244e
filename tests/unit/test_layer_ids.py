import pytest

from eyas.errors import UserError
from eyas.layer_ids import (
    CONVENTIONS,
    check_aux_layer_ids,
    check_convention,
    default_aux_layer_ids,
    from_output_of,
    parse_layer_ids,
    to_output_of,
)


@pytest.mark.parametrize(
    ("num_layers", "ids"), [(8, (2, 4, 5)), (30, (2, 15, 27)), (32, (2, 16, 29)), (61, (2, 30, 58))]
)
def test_defaults_are_the_second_the_middle_and_the_third_from_last(
    num_layers: int, ids: tuple[int, ...]
) -> None:
    assert default_aux_layer_ids(num_layers) == ids


@pytest.mark.parametrize("num_layers", range(1, 80))
def test_defaults_are_valid_at_any_depth(num_layers: int) -> None:
    ids = default_aux_layer_ids(num_layers)
    assert check_aux_layer_ids(ids, num_layers) == ids


def test_ids_from_zero_to_the_depth_are_in_range() -> None:
    assert check_aux_layer_ids([0, 3, 6], 6) == (0, 3, 6)


@pytest.mark.parametrize("bad", [7, -1])
def test_an_id_beyond_the_depth_is_refused_with_the_range(bad: int) -> None:
    with pytest.raises(UserError) as caught:
        check_aux_layer_ids(sorted([1, bad]), 6)
    assert caught.value.what == f"aux layer id {bad} is out of range: the target has 6 layers"
    assert caught.value.hint == "set target.aux_layer_ids to ids from 0 to 6 (default [2, 4, 5])"


@pytest.mark.parametrize("ids", [[3, 2], [2, 2]])
def test_ids_that_are_not_ascending_and_distinct_are_refused_with_the_mended_list(ids: list[int]) -> None:
    with pytest.raises(UserError) as caught:
        check_aux_layer_ids(ids, 6)
    assert f"target.aux_layer_ids={sorted(set(ids))}" in str(caught.value.hint)


def test_no_ids_are_refused() -> None:
    with pytest.raises(UserError, match="empty"):
        check_aux_layer_ids([], 6)


def test_the_older_kimi_command_line_converts_to_ours() -> None:
    assert from_output_of([2, 30, 58, 60]) == (3, 31, 59, 61)


def test_outputs_of_layers_are_one_less_and_undo_the_output_of_convention() -> None:
    assert to_output_of([2, 16, 29]) == (1, 15, 28)
    assert from_output_of(to_output_of([2, 16, 29])) == (2, 16, 29)


def test_the_embedding_is_no_layers_output() -> None:
    with pytest.raises(UserError, match="aux layer 0"):
        to_output_of([0, 3])


@pytest.mark.parametrize("text", ["2,16,29", "2 16 29", "[2, 16, 29]", " 2,16 29 "])
def test_ids_are_read_in_the_convention_that_is_named(text: str) -> None:
    ours, other = CONVENTIONS
    assert other == "output-of"
    assert parse_layer_ids(text, ours) == (2, 16, 29)
    assert parse_layer_ids(text, other) == (3, 17, 30)


@pytest.mark.parametrize("text", ["", "two", "2;3", "1.5"])
def test_text_that_holds_no_ids_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="cannot read the layer ids"):
        parse_layer_ids(text, CONVENTIONS[0])


def test_an_unknown_convention_is_refused_and_the_known_ones_are_not() -> None:
    for name in CONVENTIONS:
        check_convention(name)
    with pytest.raises(UserError, match="unknown layer id convention 'output_of'"):
        check_convention("output_of")
