"""What an exported folder says is what the draft computes; what is there twice is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export import PARTIAL, change_tensors, export

from eyas.errors import ContractError, EyasError
from eyas.export.native import load_export
from tiny import make_spec


def config_of(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return value


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "d2t", "lm_head.weight"])
def test_a_tensor_that_is_in_two_files_is_refused(tmp_path: Path, name: str) -> None:
    draft = export(tmp_path, make_spec(), PARTIAL)
    tensor = load_file(tmp_path / "model.safetensors")[name]
    save_file({name: tensor + 1}, tmp_path / "another.safetensors")
    with pytest.raises(ContractError, match=f"holds {name} twice"):
        load_export(tmp_path, draft.embed_tokens.weight)


def test_a_whole_copy_of_the_weights_is_refused(tmp_path: Path) -> None:
    draft = export(tmp_path, make_spec(), PARTIAL)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "model-copy.safetensors")
    with pytest.raises(ContractError, match="twice"):
        load_export(tmp_path, draft.embed_tokens.weight)


def test_tensors_in_several_files_are_one_draft(tmp_path: Path) -> None:
    draft = export(tmp_path, make_spec(), PARTIAL)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for number, name in enumerate(sorted(tensors)):
        save_file({name: tensors[name]}, tmp_path / f"part-{number % 3}-{number}.safetensors")
    again, _, _ = load_export(tmp_path, draft.embed_tokens.weight)
    assert all(torch.equal(p, draft.state_dict()[n]) for n, p in again.state_dict().items())


ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "a larger base": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 25000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_engines_old_and_new_find_the_rotary_base_and_scaling_of_the_draft(tmp_path: Path, name: str) -> None:
    rope = ROPES[name]
    export(tmp_path, make_spec(rope_parameters=rope), PARTIAL)
    config = config_of(tmp_path)
    assert config["rope_parameters"] == rope
    assert config["rope_theta"] == rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    assert config["rope_scaling"] == (None if rope["rope_type"] == "default" else scaling)


@pytest.mark.parametrize("name", ROPES)
def test_a_folder_of_the_older_rotary_keys_gives_back_the_draft(tmp_path: Path, name: str) -> None:
    draft = export(tmp_path, make_spec(rope_parameters=ROPES[name]), PARTIAL)
    config = config_of(tmp_path)
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    again, _, _ = load_export(tmp_path, draft.embed_tokens.weight)
    assert again.config == draft.config


def test_every_key_that_engines_read_has_the_value_of_the_draft(tmp_path: Path) -> None:
    spec = make_spec(
        dtype="bfloat16",
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        max_position_embeddings=777,
        norm_eps=3e-6,
        eos_token_ids=(1, 7),
    )
    export(tmp_path, spec, PARTIAL)
    config = config_of(tmp_path)
    eyas = config.pop("eyas")
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 3e-6,
        "max_position_embeddings": 777,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": 50,
        "draft_vocab_size": 10,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": [1, 7],
        "target_hidden_size": 16,
        "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        },
    }
    assert eyas["target"] == spec.to_json()
    assert eyas["target_fingerprint"] == spec.fingerprint
    assert eyas["vocab_fingerprint"] == PARTIAL.fingerprint


def test_weights_that_were_changed_do_not_have_the_recorded_checksum(tmp_path: Path) -> None:
    from eyas.files import sha256_of_file

    export(tmp_path, make_spec(), PARTIAL)
    recorded = config_of(tmp_path)["eyas"]["weights_sha256"]
    assert recorded == sha256_of_file(tmp_path / "model.safetensors")
    change_tensors(tmp_path, norm__weight=torch.ones(16))
    assert recorded != sha256_of_file(tmp_path / "model.safetensors")


def test_an_embedding_of_another_target_is_refused(tmp_path: Path) -> None:
    draft = export(tmp_path, make_spec(), PARTIAL)
    own = draft.embed_tokens.weight.detach()
    change_tensors(tmp_path, embed_tokens__weight=own.clone())
    load_export(tmp_path, own)
    with pytest.raises(ContractError, match="another embedding than this target's"):
        load_export(tmp_path, own + 1e-3)


def test_a_draft_without_an_embedding_is_refused_when_it_is_given_none(tmp_path: Path) -> None:
    export(tmp_path, make_spec(), PARTIAL)
    with pytest.raises(ContractError, match="holds no embedding of its own"):
        load_export(tmp_path, None)


@pytest.mark.parametrize("ids", [[2, 4], [2, 4, 5, 6]])
def test_more_or_fewer_layer_ids_than_the_draft_reads_are_refused(tmp_path: Path, ids: list[int]) -> None:
    draft = export(tmp_path, make_spec(), PARTIAL)
    config = config_of(tmp_path) | {"eagle_aux_hidden_state_layer_ids": ids}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ContractError, match=f"names {len(ids)} aux layers, its fc takes 3"):
        load_export(tmp_path, draft.embed_tokens.weight)


def test_ids_in_the_nested_list_alone_are_read_as_outputs_of_layers(tmp_path: Path) -> None:
    from eyas.export.read import read_draft

    export(tmp_path, make_spec(), PARTIAL)
    config = config_of(tmp_path)
    del config["eagle_aux_hidden_state_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_draft(tmp_path).aux_layer_ids == (2, 4, 5)


def test_a_map_of_another_length_than_the_configured_vocabulary_is_refused(tmp_path: Path) -> None:
    draft = export(tmp_path, make_spec(), PARTIAL)
    d2t = load_file(tmp_path / "model.safetensors")["d2t"]
    change_tensors(tmp_path, d2t=torch.cat([d2t, d2t[-1:]]))
    with pytest.raises(EyasError, match="d2t"):
        load_export(tmp_path, draft.embed_tokens.weight)


def test_a_draft_of_a_part_of_the_ids_without_a_map_is_refused(tmp_path: Path) -> None:
    draft = export(tmp_path, make_spec(), PARTIAL)
    change_tensors(tmp_path, d2t=None)
    with pytest.raises(EyasError, match="drafts 10 of 50 ids but has no d2t"):
        load_export(tmp_path, draft.embed_tokens.weight)
