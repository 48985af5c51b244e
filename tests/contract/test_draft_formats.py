"""A draft read from any published format computes the same logits; what is not computed is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas import registry
from eyas.drafters.eagle3 import export as kind
from eyas.drafters.eagle3.config import draft_config_for
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.drafters.eagle3.sglang import trouble
from eyas.errors import ContractError, UserError
from eyas.export.native import load_export
from eyas.export.read import read_draft
from eyas.types import TargetSpec, VocabMap
from tiny import make_spec

IDS = np.array([0, 1, 2, 7, 11, 12, 30, 41, 48, 49])
SPEC = make_spec(aux_layer_ids=(2, 4, 7, 8))


def make_draft(spec: TargetSpec, num_layers: int = 1) -> Eagle3Draft:
    shape = draft_config_for(spec, len(IDS), fc_norm=True, norm_output=True, num_layers=num_layers)
    draft = Eagle3Draft(shape)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return draft


def export(folder: Path, format: str, draft: Eagle3Draft, include_embedding: bool = False) -> Path:
    folder.mkdir()
    exporter = registry.resolve(registry.EXPORTERS, format, "exporter")("eagle3")
    exporter.write(folder, draft, SPEC, VocabMap(IDS, 50), include_embedding)
    exporter.verify(folder, draft, VocabMap(IDS, 50), torch.randn(12, 4, 16), torch.randint(0, 50, (12,)))
    return folder


def rewrite(
    folder: Path, rename: dict[str, str] | None = None, drop: tuple[str, ...] = (), **config: Any
) -> None:
    """Rename and drop tensors by parts of their names, change config.json (None removes a key)."""
    tensors = load_file(folder / "model.safetensors")
    for old, new in (rename or {}).items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in drop}
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def logits(draft: Eagle3Draft) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    aux, tokens = torch.randn(12, 4, 16, generator=generator), torch.arange(12)
    return kind.logits(draft, aux, tokens)


@pytest.mark.parametrize("format", sorted(registry.EXPORTERS))
@pytest.mark.parametrize("include_embedding", [False, True])
def test_a_round_trip_gives_equal_logits(tmp_path: Path, format: str, include_embedding: bool) -> None:
    draft = make_draft(SPEC)
    folder = export(tmp_path / "draft", format, draft, include_embedding)
    again, target_ids, _ = load_export(folder, draft.embed_tokens.weight)
    assert torch.equal(logits(again), logits(draft))
    assert target_ids.tolist() == IDS.tolist()
    stored = read_draft(folder)
    assert stored.aux_layer_ids == SPEC.aux_layer_ids
    assert stored.shape == draft.config
    assert (stored.embedding is not None) == include_embedding


def test_a_midlayer_checkpoint_as_specforge_writes_it_gives_equal_logits(tmp_path: Path) -> None:
    draft = make_draft(SPEC)
    folder = export(tmp_path / "draft", "native", draft, include_embedding=True)
    # Names and keys of such a checkpoint; its ids are of 0-based layers, nested only.
    rewrite(
        folder,
        {"layers.0.": "midlayer."},
        eyas=None,
        eagle_aux_hidden_state_layer_ids=None,
        rope_parameters=None,
        num_aux_hidden_states=None,
    )
    again, _, _ = load_export(folder, draft.embed_tokens.weight)
    assert torch.equal(logits(again), logits(draft))
    assert read_draft(folder).aux_layer_ids == SPEC.aux_layer_ids


def test_a_checkpoint_that_names_no_layers_leaves_them_to_the_engines_default(tmp_path: Path) -> None:
    folder = export(tmp_path / "draft", "native", make_draft(SPEC))
    rewrite(folder, eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    assert read_draft(folder).aux_layer_ids is None


def test_another_embedding_than_the_targets_is_refused(tmp_path: Path) -> None:
    draft = make_draft(SPEC)
    folder = export(tmp_path / "draft", "native", draft, include_embedding=True)
    with pytest.raises(ContractError, match="another embedding"):
        load_export(folder, draft.embed_tokens.weight + 1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "is quantised"),
        ({"architectures": ["LlamaForCausalLM"]}, "is no draft that eyas knows"),
    ],
)
def test_what_eyas_does_not_compute_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    folder = export(tmp_path / "draft", "native", make_draft(SPEC))
    rewrite(folder, **change)
    with pytest.raises(UserError, match=match):
        read_draft(folder)


def test_in_the_speculators_format_a_missing_norm_before_residual_means_that_it_does(tmp_path: Path) -> None:
    folder = export(tmp_path / "draft", "speculators", make_draft(SPEC))
    assert not read_draft(folder).shape.norm_before_residual
    rewrite(folder, norm_before_residual=None)
    assert read_draft(folder).shape.norm_before_residual


@pytest.mark.parametrize("format", sorted(registry.EXPORTERS))
@pytest.mark.parametrize("norm", ["norm_before_residual", "norm_before_fc"])
def test_a_draft_with_another_peers_norm_goes_out_and_comes_in(
    tmp_path: Path, format: str, norm: str
) -> None:
    plain = make_draft(SPEC)
    draft = Eagle3Draft(dataclasses.replace(plain.config, **{norm: True}))
    draft.load_state_dict(plain.state_dict(), strict=False)
    assert not torch.equal(logits(draft), logits(plain))
    again, _, _ = load_export(export(tmp_path / "draft", format, draft), draft.embed_tokens.weight)
    assert torch.equal(logits(again), logits(draft))
    assert norm in (trouble(again.config, None) or "")
    assert trouble(plain.config, None) is None


LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}
DEEPSEEK = make_spec(
    aux_layer_ids=(2, 4, 7, 8),
    num_key_value_heads=4,
    head_dim=10,
    latent_attention=LATENT,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.8,
        "mscale_all_dim": 1.0,
        "truncate": True,
    },
)


def latent_draft(num_layers: int = 1) -> Eagle3Draft:
    draft = Eagle3Draft(draft_config_for(DEEPSEEK, len(IDS), num_layers=num_layers, attention="mla"))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return draft


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_draft_with_latent_attention_comes_back_from_its_folder(tmp_path: Path, num_layers: int) -> None:
    draft = latent_draft(num_layers)
    folder = export(tmp_path / "draft", "native", draft)
    again, _, config = load_export(folder, draft.embed_tokens.weight)
    assert torch.equal(logits(again), logits(draft))
    assert again.config == draft.config
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    assert (trouble(draft.config, None) is None) == (num_layers == 1)
    # As published ones are: another type, the rotation under its old keys.
    rewrite(folder, model_type="kimi_k2", rope_parameters=None)
    again, _, _ = load_export(folder, draft.embed_tokens.weight)
    assert torch.equal(logits(again), logits(draft))


def test_latent_attention_has_no_speculators_form(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no speculators form") as refused:
        export(tmp_path / "draft", "speculators", latent_draft())
    assert refused.value.hint == "set export.format=native"


def test_latent_attention_is_copied_from_a_target_that_has_it_or_refused() -> None:
    with pytest.raises(UserError, match=r"draft\.attention=mla needs a target with latent attention"):
        draft_config_for(SPEC, 10, attention="mla")
    with pytest.raises(UserError, match=r"draft\.num_key_value_heads=2 means nothing"):
        draft_config_for(DEEPSEEK, 10, num_key_value_heads=2, attention="mla")
    with pytest.raises(UserError, match=r"draft\.sliding_window=8 is given for latent attention"):
        draft_config_for(DEEPSEEK, 10, attention="mla", sliding_window=8)
    lite = dataclasses.replace(DEEPSEEK, latent_attention=LATENT | {"q_lora_rank": None})  # DeepSeek-V2-Lite
    with pytest.raises(UserError, match="has no q_lora_rank, and vLLM serves no draft without it"):
        draft_config_for(lite, 10, attention="mla")


def test_a_part_of_the_vocabulary_without_d2t_is_refused(tmp_path: Path) -> None:
    folder = export(tmp_path / "draft", "native", make_draft(SPEC))
    rewrite(folder, drop=("d2t",))
    with pytest.raises(UserError, match="drafts 10 of 50 ids but has no d2t"):
        read_draft(folder)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = export(tmp_path / "draft", "native", make_draft(SPEC))
    rewrite(folder, intermediate_size=64)
    with pytest.raises(ContractError, match=r"its config\.json asks for"):
        read_draft(folder)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = export(tmp_path / "draft", "native", make_draft(SPEC))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="is damaged"):
        read_draft(folder)


def test_sglang_finds_all_it_reads(tmp_path: Path) -> None:
    """SGLang's rules, by contract: it does not run here.

    Architecture by name; ids nested, one below ours, captured at id + 1; the number of aux layers written
    out; no norm_before_residual; the embedding the target's; no tensor that it would pass over.
    """
    folder = export(tmp_path / "draft", "native", make_draft(SPEC))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    nested = config["eagle_config"]
    assert nested["use_aux_hidden_state"] is True
    assert [i + 1 for i in nested["eagle_aux_hidden_state_layer_ids"]] == list(SPEC.aux_layer_ids)
    assert config["num_aux_hidden_states"] == 4
    assert config["norm_before_residual"] is False
    assert config["tie_word_embeddings"] is False
    assert (config["fc_norm"], config["norm_output"]) == (True, True)
    assert config["draft_vocab_size"] == len(IDS)
    names = set(load_file(folder / "model.safetensors"))
    layer = {f"layers.0.{n}" for n in (
        "input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight",
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
        "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
    )}  # fmt: skip
    fixed = {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
        *(f"fc_norm.{i}.weight" for i in range(4)),
    }
    assert names == layer | fixed


@pytest.mark.parametrize("format", sorted(registry.EXPORTERS))
def test_upper_layers_have_their_norm_under_both_engines_names(tmp_path: Path, format: str) -> None:
    draft = make_draft(SPEC, num_layers=2)
    folder = export(tmp_path / "draft", format, draft)
    tensors = load_file(folder / "model.safetensors")
    upper = tensors["layers.1.input_layernorm.weight"]
    assert torch.equal(tensors["layers.1.hidden_norm.weight"], upper)
    again, _, _ = load_export(folder, draft.embed_tokens.weight)
    assert torch.equal(logits(again), logits(draft))


def test_an_upper_layer_whose_two_norms_differ_is_refused(tmp_path: Path) -> None:
    folder = export(tmp_path / "draft", "native", make_draft(SPEC, num_layers=2))
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.1.hidden_norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ContractError, match="two norms"):
        read_draft(folder)
