"""A folder that holds no draft is refused by what is wrong with it, as the user's mistake."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_export import PARTIAL, change_config, change_tensors, export

from eyas.errors import ContractError, UserError
from eyas.export.native import load_export
from eyas.export.read import kind_of, read_config, read_draft
from tiny import make_spec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export(tmp_path, make_spec(), PARTIAL)
    return tmp_path


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no draft: it has no config\.json"):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", "7", '{"architectures": 7}', '{"transformer_layer_config": [1]}', "[" * 100_000]
)
def test_a_configuration_that_is_not_one(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        read_config(folder)


@pytest.mark.parametrize("config", [{}, {"architectures": None}, {"transformer_layer_config": None}])
def test_keys_that_are_left_out_or_null_are_no_damage(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    assert read_config(folder) == config


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds no \*\.safetensors weights"):
        read_draft(folder)


def test_weights_that_are_cut_off(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-9])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        read_draft(folder)


IMPOSSIBLE: list[dict[str, Any]] = [
    {"hidden_size": "wide"},
    {"num_attention_heads": 0},
    {"vocab_size": None},
    {"intermediate_size": -1},
]


@pytest.mark.parametrize("changes", IMPOSSIBLE)
def test_a_shape_that_cannot_be(folder: Path, changes: dict[str, Any]) -> None:
    change_config(folder, head_dim=None, **changes)
    with pytest.raises(UserError, match=r"config\.json describes no draft"):
        read_draft(folder)


@pytest.mark.parametrize(
    ("config", "is_known"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, True),
        ({"architectures": ["Other", "EAGLE3Model"]}, True),
        ({"speculators_model_type": "eagle3"}, True),
        ({"speculators_model_type": "mtp", "architectures": ["Eagle3"]}, False),
        ({"architectures": ["LlamaForCausalLM"]}, False),
        ({}, False),
    ],
)
def test_the_kind_of_a_draft_is_read_from_its_configuration(
    tmp_path: Path, config: dict[str, Any], is_known: bool
) -> None:
    if is_known:
        assert kind_of(tmp_path, config) == "eagle3"
        return
    named = ", ".join(config.get("architectures", ["no kind"]))
    with pytest.raises(UserError, match=f"is no draft that eyas knows: its config.json names {named}"):
        kind_of(tmp_path, config)


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias", "quantization_config", "parallel_drafting"])
@pytest.mark.parametrize("inside", [False, True])
def test_what_eyas_does_not_compute(folder: Path, key: str, inside: bool) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop(key, None)
    given = {"transformer_layer_config": {key: True}} if inside else {key: True}
    (folder / "config.json").write_text(json.dumps(config | given))
    with pytest.raises(UserError, match=rf"\({key}\), which eyas does not compute"):
        read_draft(folder)


def test_a_tensor_of_another_shape(folder: Path) -> None:
    draft = export(folder, make_spec(), PARTIAL)
    change_tensors(folder, norm__weight=draft.norm.weight.detach()[:-1].clone())
    with pytest.raises(ContractError, match=r"norm\.weight is \(15,\), its config\.json asks for \(16,\)"):
        load_export(folder, draft.embed_tokens.weight)
