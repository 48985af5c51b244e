"""Facts of a target that its files leave open, and the last layer as a draft starts from it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.config.schema import TargetSettings
from eyas.errors import EyasError, UserError
from eyas.targets.spec import _dtype, _head_dim, _is_tied, _mlp_width, read_outline, read_target
from eyas.targets.teacher import read_last_layer
from families import make_family
from pipeline import change_json
from tiny import make_target, spec_of


@pytest.mark.parametrize(("name", "one_plus"), [("llama", 0.0), ("gemma2", 1.0)])
def test_norms_of_the_last_layer_are_what_they_multiply_by(
    tmp_path: Path, name: str, one_plus: float
) -> None:
    folder = make_family(tmp_path / name, name)
    tensors = load_file(folder / "model.safetensors")
    found = read_last_layer(folder, spec_of(folder))
    layer = "model.layers.3."
    assert torch.equal(found["input_layernorm.weight"], tensors[f"{layer}input_layernorm.weight"] + one_plus)
    for matrix in ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight"):
        assert torch.equal(found[matrix], tensors[layer + matrix])
    norm = "pre_feedforward_layernorm" if one_plus else "post_attention_layernorm"
    assert torch.equal(found["post_attention_layernorm.weight"], tensors[f"{layer}{norm}.weight"] + one_plus)


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ({"intermediate_size": 7, "hidden_size": 4}, 7),
        ({"intermediate_size_mlp": 9, "intermediate_size": 7, "hidden_size": 4}, 9),
        ({"intermediate_size_mlp": 0, "intermediate_size": 7, "hidden_size": 4}, 7),
        ({"intermediate_size": None, "hidden_size": 4}, 12),
        ({"hidden_size": 4}, 12),
    ],
)
def test_the_width_of_the_mlp_is_the_dense_ones_or_three_times_the_models(
    text: dict[str, Any], width: int
) -> None:
    assert _mlp_width(SimpleNamespace(**text)) == width


def test_the_width_of_a_head_is_named_or_divides_the_model() -> None:
    assert _head_dim(SimpleNamespace(hidden_size=64, head_dim=48), 4, None) == 48
    assert _head_dim(SimpleNamespace(hidden_size=64), 4, None) == 16
    assert _head_dim(SimpleNamespace(hidden_size=64), 4, {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4}) == 10
    with pytest.raises(UserError, match="hidden size 64 does not divide into 5 attention heads"):
        _head_dim(SimpleNamespace(hidden_size=64), 5, None)


def config_of(whole: Any, text: Any) -> Any:
    return SimpleNamespace(dtype=whole, get_text_config=lambda: SimpleNamespace(dtype=text))


@pytest.mark.parametrize(
    ("whole", "text", "found"),
    [
        (torch.float16, None, "float16"),
        (torch.float16, torch.float32, "float16"),
        (None, torch.float32, "float32"),
        (None, None, "bfloat16"),
    ],
)
def test_the_type_is_the_wrappers_or_the_text_models(whole: Any, text: Any, found: str) -> None:
    assert _dtype(Path("m"), config_of(whole, text), None) == found


def test_a_type_in_which_states_are_not_computed_is_refused() -> None:
    with pytest.raises(UserError, match="names the type float64"):
        _dtype(Path("m"), config_of(torch.float64, None), None)


@pytest.mark.parametrize(
    ("has_head", "text", "whole", "tied"),
    [
        (True, False, False, False),
        (True, True, True, True),
        (False, True, False, True),
        (False, False, True, True),
        (False, False, False, None),
        (None, True, False, True),
        (None, False, False, False),
    ],
)
def test_a_head_is_tied_where_none_exists_or_the_configuration_says_so(
    has_head: bool | None, text: bool, whole: bool, tied: bool | None
) -> None:
    head = "lm_head.weight" if has_head else None
    weights: Any = (
        SimpleNamespace(head=head, files=SimpleNamespace(where="m")) if has_head is not None else None
    )
    arguments = weights, SimpleNamespace(tie_word_embeddings=whole), SimpleNamespace(tie_word_embeddings=text)
    if tied is None:
        with pytest.raises(UserError, match=r"holds no lm_head, and its config\.json does not tie it"):
            _is_tied(*arguments)
    else:
        assert _is_tied(*arguments) == tied


def test_an_outline_is_made_of_the_configuration_alone(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "t")
    whole = spec_of(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    outline = read_outline(folder, TargetSettings(model=str(folder)))
    for name in (
        "hidden_size",
        "vocab_size",
        "num_layers",
        "aux_layer_ids",
        "head_dim",
        "norm_kind",
        "dtype",
    ):
        assert getattr(outline, name) == getattr(whole, name)
    assert outline.weights_fingerprint == outline.tokenizer_fingerprint == "unknown"


def test_weights_that_are_not_all_there_are_refused_with_the_target(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "t")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(EyasError, match=r"model\.safetensors"):
        read_target(folder, TargetSettings(model=str(folder)))


def test_a_tokenizer_of_more_ids_than_the_embedding_is_refused_with_the_target(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "t")
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:200].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_json(folder / "config.json", vocab_size=200)
    with pytest.raises(UserError):
        read_target(folder, TargetSettings(model=str(folder)))
