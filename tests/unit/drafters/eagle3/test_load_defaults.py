"""What a published draft's config.json leaves out has the value that engines take."""

import dataclasses
from typing import Any

import pytest
import torch

from eyas.drafters.common.window import window_of
from eyas.drafters.eagle3.load import _aux_layer_ids, _shape
from eyas.errors import UserError

LEAST = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "intermediate_size": 24,
}
IDS = "eagle_aux_hidden_state_layer_ids"
TENSORS = {"fc.weight": torch.zeros(32, 96)}


def shape_of(config: dict[str, Any], inside: dict[str, Any] | None = None) -> dict[str, Any]:
    found = _shape(config, config if inside is None else inside, TENSORS)
    return {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}


def test_the_least_configuration_has_the_defaults_of_engines() -> None:
    assert shape_of(LEAST) == {
        "hidden_size": 32,
        "target_hidden_size": 32,
        "num_aux_layers": 3,
        "vocab_size": 50,
        "target_vocab_size": 50,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "fc_norm": False,
        "norm_output": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "num_layers": 1,
        "sliding_window": None,
        "latent_attention": None,
    }


NORMS = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")
GIVEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"target_hidden_size": 16}, {"target_hidden_size": 16, "num_aux_layers": 6}),
    ({"head_dim": 16}, {"head_dim": 16}),
    ({"num_key_value_heads": 2}, {"num_key_value_heads": 2}),
    ({"draft_vocab_size": 10}, {"vocab_size": 10, "target_vocab_size": 50}),
    ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-5}),
    ({"max_position_embeddings": 99}, {"max_position_embeddings": 99}),
    ({"num_hidden_layers": 3}, {"num_layers": 3}),
    *(
        ({name: True}, {name: True})
        for name in ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")
    ),
    ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    (
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
    ),
    (
        {"rope_theta": 1.0, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
    ),
]


@pytest.mark.parametrize(("given", "changes"), GIVEN, ids=[", ".join(given) for given, _ in GIVEN])
def test_what_is_given_is_taken_and_changes_nothing_else(
    given: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert shape_of(LEAST | given) == shape_of(LEAST) | changes


def test_in_the_speculators_format_only_norm_before_residual_is_on_when_it_is_left_out() -> None:
    assert shape_of({}, LEAST) == shape_of(LEAST) | {"norm_before_residual": True}
    assert shape_of({"norm_before_residual": False}, LEAST) == shape_of(LEAST)
    on = {"fc_norm": True, "norm_output": True, "norm_before_fc": True}
    assert shape_of({}, LEAST | on) == shape_of(LEAST) | on | {"norm_before_residual": True}


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({}, None),
        ({"sliding_window": 64}, None),
        ({"sliding_window": 64, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 64, "layer_types": ["sliding_attention"]}, 64),
        ({"sliding_window": 64, "layer_types": None}, None),
        ({"sliding_window": 64, "layer_types": ["sliding_attention"] * 2, "num_hidden_layers": 2}, 64),
        # Of more types than layers the first ones count.
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}, 64),
    ],
)
def test_a_window_counts_where_a_layer_asks_for_it(config: dict[str, Any], window: int | None) -> None:
    assert window_of(config) == window
    assert shape_of(LEAST | config)["sliding_window"] == window


def test_a_window_of_some_layers_only_is_refused() -> None:
    types = ["sliding_attention", "full_attention"]
    with pytest.raises(UserError, match="some layers of the draft have a window"):
        window_of({"sliding_window": 64, "layer_types": types, "num_hidden_layers": 2})


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, None),
        ({"eagle_config": None}, None),
        ({IDS: [2, 4]}, (2, 4)),
        ({"eagle_config": {IDS: [2, 4]}}, (3, 5)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1],
                "eagle_config": {IDS: [7]},
            },
            (1,),
        ),
        ({IDS: [], "eagle_config": {}}, None),
    ],
)
def test_layer_ids_are_ours_at_the_top_and_outputs_of_layers_in_the_nested_list(
    config: dict[str, Any], ids: tuple[int, ...] | None
) -> None:
    assert _aux_layer_ids(config) == ids
