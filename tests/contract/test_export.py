"""An exported folder gives back the draft that was trained, or is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas import registry
from eyas.drafters.eagle3.config import draft_config_for
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.errors import ContractError
from eyas.export.native import load_export
from eyas.types import TargetSpec, VocabMap
from tiny import make_spec

IDS = np.array([0, 1, 2, 7, 11, 12, 30, 41, 48, 49])
PARTIAL, FULL = VocabMap(IDS, 50), VocabMap(np.arange(50), 50)


def make_draft(spec: TargetSpec, vocab: VocabMap) -> Eagle3Draft:
    draft = Eagle3Draft(draft_config_for(spec, len(vocab)))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return draft


def export(folder: Path, spec: TargetSpec, vocab: VocabMap) -> Eagle3Draft:
    folder.mkdir(exist_ok=True)
    draft = make_draft(spec, vocab)
    registry.resolve(registry.EXPORTERS, "native", "exporter")("eagle3").write(folder, draft, spec, vocab)
    return draft


def verify(folder: Path, draft: Eagle3Draft, vocab: VocabMap) -> None:
    exporter = registry.resolve(registry.EXPORTERS, "native", "exporter")("eagle3")
    exporter.verify(folder, draft, vocab, torch.randn(12, 3, 16), torch.randint(0, 50, (12,)))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("vocab", [PARTIAL, FULL], ids=["partial", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folder_gives_back_the_draft(tmp_path: Path, vocab: VocabMap, dtype: str) -> None:
    spec = make_spec(dtype=dtype)
    draft = export(tmp_path, spec, vocab)
    verify(tmp_path, draft, vocab)
    again, target_ids, config = load_export(tmp_path, draft.embed_tokens.weight)
    assert target_ids.tolist() == vocab.target_ids.tolist()
    assert again.config == draft.config
    for name, parameter in draft.state_dict().items():
        wanted = parameter if "embed" in name else parameter.to(getattr(torch, dtype)).float()
        assert torch.equal(again.state_dict()[name], wanted), name
    assert TargetSpec.from_json(config["eyas"]["target"]) == spec


def test_target_ids_are_draft_ids_plus_d2t_and_t2d_says_the_same(tmp_path: Path) -> None:
    export(tmp_path, make_spec(), PARTIAL)
    tensors = load_file(tmp_path / "model.safetensors")
    assert (tensors["d2t"] + torch.arange(10)).tolist() == IDS.tolist()
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].nonzero().flatten().tolist() == IDS.tolist()
    assert not any(name.startswith("model.") for name in tensors)


def test_a_draft_of_the_whole_vocabulary_has_no_maps(tmp_path: Path) -> None:
    export(tmp_path, make_spec(), FULL)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))


def test_each_engine_finds_the_layer_ids_in_its_own_place_and_convention(tmp_path: Path) -> None:
    export(tmp_path, make_spec(aux_layer_ids=(2, 4, 7, 8)), PARTIAL)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 7, 8]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6, 7]
    assert config["num_aux_hidden_states"] == 4
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (50, 10)
    assert config["norm_before_residual"] is False


def test_a_shuffled_d2t_is_refused(tmp_path: Path) -> None:
    draft = export(tmp_path, make_spec(), PARTIAL)
    d2t = load_file(tmp_path / "model.safetensors")["d2t"]
    change_tensors(tmp_path, d2t=d2t.flip(0))
    with pytest.raises(ContractError, match="d2t"):
        verify(tmp_path, draft, PARTIAL)


def test_absolute_ids_in_place_of_offsets_are_refused(tmp_path: Path) -> None:
    draft = export(tmp_path, make_spec(), PARTIAL)
    change_tensors(tmp_path, d2t=torch.from_numpy(IDS))
    with pytest.raises(ContractError, match="d2t"):
        verify(tmp_path, draft, PARTIAL)


@pytest.mark.parametrize(
    "tensors",
    [{"mystery__weight": torch.zeros(3)}, {"fc__weight": None}, {"model__norm__weight": torch.zeros(16)}],
)
def test_an_unknown_or_missing_tensor_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor | None]
) -> None:
    draft = export(tmp_path, make_spec(), PARTIAL)
    change_tensors(tmp_path, **tensors)
    with pytest.raises(ContractError, match="unknown or missing tensors"):
        verify(tmp_path, draft, PARTIAL)


@pytest.mark.parametrize("name", sorted(make_draft(make_spec(), PARTIAL).trainable()))
def test_a_change_in_any_tensor_is_noticed(tmp_path: Path, name: str) -> None:
    draft = export(tmp_path, make_spec(), PARTIAL)
    tensor = load_file(tmp_path / "model.safetensors")[name]
    change_tensors(tmp_path, **{name.replace(".", "__"): tensor * 1.01 + 0.01})
    with pytest.raises(ContractError, match="logits differ"):
        verify(tmp_path, draft, PARTIAL)


def test_head_rows_that_do_not_match_the_vocabulary_are_noticed(tmp_path: Path) -> None:
    draft = export(tmp_path, make_spec(), PARTIAL)
    change_tensors(tmp_path, lm_head__weight=draft.lm_head.weight.detach().flip(0).contiguous())
    with pytest.raises(ContractError, match="logits differ"):
        verify(tmp_path, draft, PARTIAL)


def test_weights_that_are_not_numbers_are_noticed(tmp_path: Path) -> None:
    draft = export(tmp_path, make_spec(), PARTIAL)
    change_tensors(tmp_path, norm__weight=torch.full((16,), float("nan")))
    with pytest.raises(ContractError, match="logits differ"):
        verify(tmp_path, draft, PARTIAL)


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 2.0}},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    ],
    ids=["eps", "rope", "heads"],
)
def test_a_configuration_that_computes_something_else_is_noticed(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    draft = export(tmp_path, make_spec(), PARTIAL)
    change_config(tmp_path, **change)
    with pytest.raises(ContractError, match=r"config\.json describes another draft"):
        verify(tmp_path, draft, PARTIAL)


def test_layer_ids_that_disagree_are_refused(tmp_path: Path) -> None:
    draft = export(tmp_path, make_spec(), PARTIAL)
    change_config(tmp_path, eagle_aux_hidden_state_layer_ids=[1, 4, 5])
    with pytest.raises(ContractError, match="aux layer ids"):
        verify(tmp_path, draft, PARTIAL)


def test_a_draft_for_another_target_is_refused_with_both_shapes(tmp_path: Path) -> None:
    export(tmp_path, make_spec(), PARTIAL)
    with pytest.raises(ContractError, match=r"50 ids and width 16; this target has \(60, 16\)"):
        load_export(tmp_path, torch.zeros(60, 16))


def test_verification_depends_on_rotary_positions(tmp_path: Path) -> None:
    from eyas.drafters.eagle3.export import logits

    draft = make_draft(make_spec(), PARTIAL)
    turned = make_draft(make_spec(rope_parameters={"rope_type": "default", "rope_theta": 2.0}), PARTIAL)
    turned.load_state_dict(draft.state_dict())
    aux, tokens = torch.randn(12, 3, 16), torch.randint(0, 50, (12,))
    difference = logits(draft, aux, tokens) - logits(turned, aux, tokens)
    assert difference.abs().max() > 1e-3
