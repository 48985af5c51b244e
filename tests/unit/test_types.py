import json

import numpy as np
import pytest
import torch

from eyas.errors import ContractError, UserError
from eyas.types import (
    Conversation,
    HiddenStates,
    Message,
    TargetSpec,
    TokenizedSample,
    VocabMap,
    supervised_positions,
)
from tiny import make_spec


def sample(mask: str, cut: bool = False) -> TokenizedSample:
    bits = np.array([c == "1" for c in mask])
    return TokenizedSample("s", np.arange(len(bits), dtype=np.int32), bits, cut)


def test_a_position_is_supervised_when_its_token_and_the_next_are_the_assistants() -> None:
    mask = np.array([False, True, True, True, False, True, False])
    assert supervised_positions(mask, cut=False).tolist() == [False, True, True, False, False, False, False]


def test_the_last_token_is_supervised_only_when_the_answer_goes_on() -> None:
    assert sample("011", cut=False).supervised.tolist() == [False, True, False]
    assert sample("011", cut=True).supervised.tolist() == [False, True, True]


@pytest.mark.parametrize("mask", ["000", "010", "001", "101"])
def test_refuses_a_sample_without_a_supervised_row(mask: str) -> None:
    with pytest.raises(ContractError, match="no supervised row"):
        sample(mask)


def test_refuses_ids_and_mask_of_different_lengths() -> None:
    with pytest.raises(ContractError, match=r"\(3,\) token ids but \(2,\) mask"):
        TokenizedSample("s", np.zeros(3, np.int32), np.ones(2, bool))


def test_refuses_an_empty_sample() -> None:
    with pytest.raises(ContractError):
        TokenizedSample("s", np.zeros(0, np.int32), np.zeros(0, bool))


def test_refuses_a_negative_token_id() -> None:
    with pytest.raises(ContractError, match="negative token id -1"):
        TokenizedSample("s", np.array([-1, 2], np.int32), np.ones(2, bool))


def test_hidden_states_keep_of_last_exactly_the_supervised_rows() -> None:
    last = torch.arange(5.0)[:, None].expand(5, 4)
    figures = torch.zeros(5, 3, 4), last
    states = HiddenStates.select(sample("00111"), torch.zeros(5, 3, 4), last, figures)
    assert states.last[:, 0].tolist() == [2.0, 3.0]
    assert states.figures is not None
    assert states.figures[1][:, 0].tolist() == [2.0, 3.0]


def test_figures_of_other_rows_are_refused() -> None:
    figures = torch.zeros(5, 3, 4), torch.zeros(3, 4)
    with pytest.raises(ContractError, match="sample s: figures of other rows"):
        HiddenStates(sample("00111"), torch.zeros(5, 3, 4), torch.zeros(2, 4), figures)


@pytest.mark.parametrize(
    ("aux", "last"),
    [((4, 3, 4), (2, 4)), ((5, 3, 4), (3, 4)), ((5, 3, 4), (2, 5)), ((5, 12), (2, 4))],
)
def test_hidden_states_of_another_shape_are_refused(aux: tuple[int, ...], last: tuple[int, ...]) -> None:
    with pytest.raises(ContractError, match="sample s"):
        HiddenStates(sample("00111"), torch.zeros(aux), torch.zeros(last))


def test_select_refuses_rows_of_another_request() -> None:
    with pytest.raises(ContractError, match="5 tokens but 6 rows"):
        HiddenStates.select(sample("00111"), torch.zeros(5, 3, 4), torch.zeros(6, 4))


def test_an_unknown_role_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError) as caught:
        Message("asistant", "hello")
    assert caught.value.what == "unknown role 'asistant'"
    assert "assistant" in str(caught.value.hint)


def test_a_conversation_without_messages_is_refused() -> None:
    with pytest.raises(UserError, match="has no messages"):
        Conversation("c", (), "x")


def test_a_message_gives_the_template_only_what_it_has() -> None:
    assert Message("user", "hi").for_template() == {"role": "user", "content": "hi"}
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    rich = Message("assistant", "", "because", (call,)).for_template()
    assert rich == {"role": "assistant", "content": "", "reasoning_content": "because", "tool_calls": [call]}


@pytest.mark.parametrize("ids", [[], [3, 3], [4, 2], [-1, 2], [2, 10]])
def test_a_vocabulary_that_is_not_ascending_distinct_and_in_range_is_refused(ids: list[int]) -> None:
    with pytest.raises(ContractError):
        VocabMap(np.array(ids, dtype=np.int64), 10)


def test_vocabularies_differ_in_fingerprint_when_they_differ_in_any_id() -> None:
    a, b = VocabMap(np.array([1, 2]), 10), VocabMap(np.array([1, 3]), 10)
    assert a.fingerprint != b.fingerprint
    assert a.fingerprint != VocabMap(np.array([1, 2]), 11).fingerprint
    assert VocabMap(np.arange(10), 10).is_full
    assert not a.is_full


def test_a_target_description_survives_json() -> None:
    spec = make_spec()
    assert TargetSpec.from_json(spec.to_json()) == spec


def test_a_target_description_with_other_fields_is_refused() -> None:
    value = make_spec().to_json() | {"colour": "blue"}
    with pytest.raises(ContractError, match="colour"):
        TargetSpec.from_json(value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float64"}, "dtype is 'float64'"),
        ({"hidden_size": "16"}, "hidden_size: Input should be a valid integer, not '16'"),
        ({"tied_head": 1}, "tied_head: Input should be a valid boolean, not 1"),
        ({"norm_kind": "batch"}, "norm_kind: Input should be 'rms', 'rms_one_plus' or 'layer', not 'batch'"),
        ({"aux_layer_ids": [1, "2"]}, "aux_layer_ids.1: Input should be a valid integer, not '2'"),
    ],
)
def test_a_target_description_with_a_field_of_another_type_is_refused(
    change: dict[str, object], words: str
) -> None:
    with pytest.raises(ContractError) as caught:
        TargetSpec.from_json(make_spec().to_json() | change)
    assert words in caught.value.what
    assert "\n" not in caught.value.what


@pytest.mark.parametrize("name", ["hidden_size", "rope_parameters", "latent_attention"])
def test_a_target_description_without_a_field_is_refused(name: str) -> None:
    value = make_spec().to_json()
    del value[name]
    with pytest.raises(ContractError, match=name):
        TargetSpec.from_json(value)


@pytest.mark.parametrize("number", [30, 30.0])
def test_whole_numbers_of_a_target_description_come_back_as_they_were(number: float) -> None:
    spec = make_spec(logit_softcap=number)
    assert TargetSpec.from_json(json.loads(json.dumps(spec.to_json()))).fingerprint == spec.fingerprint


def test_the_fingerprint_ignores_where_the_model_lies_and_nothing_else() -> None:
    spec = make_spec()
    assert make_spec(model="elsewhere", revision="main").fingerprint == spec.fingerprint
    for change in (
        {"aux_layer_ids": (1, 4, 5)},
        {"weights_fingerprint": "other"},
        {"dtype": "bfloat16"},
        {"norm_kind": "rms_one_plus"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
    ):
        assert make_spec(**change).fingerprint != spec.fingerprint


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="4 attention heads do not divide into 3 key/value heads"):
        make_spec(num_key_value_heads=3)


def test_bytes_per_token_counts_aux_and_last_layers() -> None:
    assert make_spec().bytes_per_token == (3 + 1) * 16 * 4
    assert make_spec(dtype="bfloat16").bytes_per_token == (3 + 1) * 16 * 2
