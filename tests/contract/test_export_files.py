"""What an exported folder says is what the draft computes; what is there twice is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export import PARTIAL, change_tensors, export, verify

from eyas import registry
from eyas.drafters.eagle3.config import draft_config_for
from eyas.drafters.eagle3.export import speculators_config
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.errors import ContractError, EyasError
from eyas.export.native import NativeExporter, load_export
from eyas.export.read import read_draft
from eyas.files import sha256_of_file
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


@pytest.mark.parametrize("form", ["native", "speculators"])
def test_a_window_is_written_for_every_layer_and_read_again(tmp_path: Path, form: str) -> None:
    draft = Eagle3Draft(draft_config_for(make_spec(), len(PARTIAL), num_layers=2, sliding_window=9))
    exporter = registry.resolve(registry.EXPORTERS, form, "exporter")("eagle3")
    exporter.write(tmp_path, draft, make_spec(), PARTIAL, True)
    config = config_of(tmp_path)
    inside = config.get("transformer_layer_config", config)
    assert inside["layer_types"] == ["sliding_attention"] * 2
    assert inside["sliding_window"] == 9
    assert read_draft(tmp_path).shape == draft.config


def test_weights_that_were_changed_do_not_have_the_recorded_checksum(tmp_path: Path) -> None:
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


def test_every_key_of_the_speculators_form_has_the_value_of_the_draft(tmp_path: Path) -> None:
    spec = make_spec(dtype="bfloat16", intermediate_size=24, head_dim=8)
    export(tmp_path, spec, PARTIAL)
    native = config_of(tmp_path)
    found = speculators_config(native)
    layer = found.pop("transformer_layer_config")
    assert layer == {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": 50,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "num_aux_hidden_states": 3,
    }
    assert found == {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "fake", "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": 10,
        "target_hidden_size": 16,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eyas": native["eyas"],
    }


@pytest.mark.parametrize(("num_tensors", "is_refused"), [(11, True), (12, False)])
def test_more_layers_than_tensors_are_refused_before_they_are_made(
    tmp_path: Path, num_tensors: int, is_refused: bool
) -> None:
    draft = export(tmp_path, make_spec(), PARTIAL)
    names = {n for n in load_file(tmp_path / "model.safetensors") if n not in ("d2t", "t2d")}
    config = config_of(tmp_path) | {"num_hidden_layers": len(names) + (12 - num_tensors)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    what = "layers in" if is_refused else "unknown or missing tensors"
    with pytest.raises(EyasError, match=what):
        load_export(tmp_path, draft.embed_tokens.weight)


def test_a_draft_with_an_embedding_of_its_width_keeps_it_when_it_is_given_the_targets(tmp_path: Path) -> None:
    spec = make_spec()
    config = draft_config_for(spec, len(PARTIAL), num_attention_heads=4, hidden_size=32)
    draft = Eagle3Draft(config)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn_like(parameter))
    NativeExporter("eagle3").write(tmp_path, draft, spec, PARTIAL)
    for embedding in (None, torch.randn(50, 16)):
        again, _, _ = load_export(tmp_path, embedding)
        assert torch.equal(again.embed_tokens.weight, draft.embed_tokens.weight)


def test_a_draft_that_shares_the_embedding_can_be_built_before_it_is_there(tmp_path: Path) -> None:
    draft = export(tmp_path, make_spec(), PARTIAL)
    again = read_draft(tmp_path).build(None)
    assert torch.equal(again.fc.weight, draft.fc.weight)
    whole = read_draft(tmp_path).build(draft.embed_tokens.weight)
    assert torch.equal(whole.embed_tokens.weight, draft.embed_tokens.weight)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 5e-2), ("float16", 1e-2)])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_logits_are_compared_within_the_rounding_of_the_type_by_their_own_size(
    tmp_path: Path, dtype: str, tolerance: float, size: float
) -> None:
    draft = export(tmp_path, make_spec(dtype=dtype), PARTIAL)
    with torch.no_grad():
        draft.lm_head.weight.mul_(size)
    head = draft.lm_head.weight.detach().to(getattr(torch, dtype))
    change_tensors(tmp_path, lm_head__weight=head)
    verify(tmp_path, draft, PARTIAL)
    change_tensors(tmp_path, lm_head__weight=head * (1 + 0.2 * tolerance))
    if dtype != "float32":
        verify(tmp_path, draft, PARTIAL)
    change_tensors(tmp_path, lm_head__weight=head * (1 + 4 * tolerance))
    with pytest.raises(ContractError, match="logits differ"):
        verify(tmp_path, draft, PARTIAL)
