import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from eyas.config.schema import TargetSettings
from eyas.engines.transformers.engine import TransformersEngine
from eyas.errors import ContractError, UserError
from eyas.targets import config
from eyas.targets.architectures import family_of
from eyas.targets.resolve_model import locate, locate_config, locate_description
from eyas.targets.spec import read_target
from eyas.targets.teacher import TeacherHead, read_teacher
from eyas.targets.weights import Weights
from families import make_family, shard_weights
from pipeline import change_json
from tiny import make_target, spec_of


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_target, tmp_path / "target"))


def test_a_target_is_described_by_its_own_files(tiny_target: Path) -> None:
    spec = spec_of(tiny_target)
    assert (spec.architecture, spec.hidden_size, spec.vocab_size) == ("LlamaForCausalLM", 32, 300)
    assert (spec.num_layers, spec.aux_layer_ids, spec.dtype) == (6, (2, 4, 5), "float32")
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (4, 2, 32)
    assert (spec.norm_kind, spec.norm_eps, spec.tied_head) == ("rms", 1e-6, False)
    assert spec.rope_parameters["rope_theta"] == 10000.0


def test_settings_override_layers_and_dtype(tiny_target: Path) -> None:
    settings = TargetSettings(model=str(tiny_target), aux_layer_ids=(0, 6), dtype="bfloat16")
    spec = read_target(tiny_target, settings)
    assert (spec.aux_layer_ids, spec.dtype) == ((0, 6), "bfloat16")


def test_a_transformers_that_an_old_vllm_asks_for_is_refused(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.transformers, "__version__", "4.57.6")
    with pytest.raises(UserError, match=r"transformers 4\.57\.6 is too old, eyas needs 5\.0") as error:
        read_target(tiny_target, TargetSettings(model=str(tiny_target)))
    assert "vLLM before 0.19 forbids that" in str(error.value.hint)


def test_end_of_turn_is_all_that_any_file_names(target: Path) -> None:
    change_json(target / "config.json", eos_token_id=[5, 1])
    change_json(target / "generation_config.json", eos_token_id=9)
    assert spec_of(target).eos_token_ids == (1, 5, 9)


def test_the_same_model_elsewhere_is_the_same_target(tiny_target: Path, target: Path) -> None:
    assert spec_of(target).fingerprint == spec_of(tiny_target).fingerprint


def test_another_fine_tune_of_the_same_shape_is_another_target(tiny_target: Path, tmp_path: Path) -> None:
    other = make_target(tmp_path / "other", seed=1)
    assert spec_of(other).weights_fingerprint != spec_of(tiny_target).weights_fingerprint


def test_a_changed_template_or_tokenizer_is_another_target(tiny_target: Path, target: Path) -> None:
    before = spec_of(tiny_target)
    (target / "chat_template.jinja").write_text("{{ messages }}")
    assert spec_of(target).template_fingerprint != before.template_fingerprint
    assert spec_of(target).tokenizer_fingerprint == before.tokenizer_fingerprint
    with (target / "tokenizer.json").open("a") as f:
        f.write("\n")
    assert spec_of(target).tokenizer_fingerprint != before.tokenizer_fingerprint


def test_a_tokenizer_that_does_not_load_is_refused(target: Path) -> None:
    (target / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(UserError, match="has no tokenizer that loads"):
        spec_of(target)


def test_sharded_weights_give_the_same_tensors(tiny_target: Path, target: Path) -> None:
    shard_weights(target)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(Weights(target).read(name), Weights(tiny_target).read(name))


def test_a_missing_shard_or_tensor_is_named(target: Path) -> None:
    with pytest.raises(UserError, match="holds no tensor nonsense"):
        Weights(target).read("nonsense")
    shard_weights(target)
    with pytest.raises(UserError, match="holds no tensor nonsense"):
        Weights(target).read("nonsense")
    for file in target.glob("model-*.safetensors"):
        file.unlink()
    with pytest.raises(UserError, match=r"lacks model-0000.-of-00002\.safetensors"):
        Weights(target).read("lm_head.weight")


def test_a_truncated_weight_file_is_damaged(target: Path) -> None:
    path = target / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="is damaged"):
        Weights(target).read("lm_head.weight")


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "tied", tied=True)
    spec = spec_of(folder)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    teacher = read_teacher(folder, spec)
    assert teacher.head is teacher.embedding
    moved = teacher.to("cpu", torch.float64)
    assert moved.head is moved.embedding


def test_a_head_of_another_shape_is_refused(target: Path) -> None:
    spec = spec_of(target)
    tensors = load_file(target / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(299, 32)}, target / "model.safetensors")
    with pytest.raises(ContractError, match=r"head is \(299, 32\), its configuration says \(300, 32\)"):
        read_teacher(target, spec)


def head(norm_kind: str = "rms", softcap: float | None = None, scale: float = 1.0) -> TeacherHead:
    weight = torch.randn(40, 8)
    return TeacherHead(torch.randn(8), weight, weight, norm_kind, 1e-5, softcap, scale)  # type: ignore[arg-type]


def test_one_plus_norms_add_one_to_the_weight() -> None:
    plain, plus = head(), head("rms_one_plus")
    x = torch.randn(5, 8)
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(plain.normed(x), plain.norm_weight * normed)
    torch.testing.assert_close(plus.normed(x), (1 + plus.norm_weight) * normed)


def test_logits_are_scaled_and_then_capped() -> None:
    x = torch.randn(5, 8) * 10
    capped = head(softcap=3.0, scale=0.5)
    raw = capped.normed(x) @ capped.head.T
    torch.testing.assert_close(capped.logits(x), 3.0 * torch.tanh(raw * 0.5 / 3.0))
    assert capped.logits(x).abs().max() <= 3.0


def test_an_unknown_architecture_gets_the_closest_match_and_what_a_new_one_needs() -> None:
    with pytest.raises(UserError, match="did you mean 'Qwen3ForCausalLM'") as caught:
        family_of("Qwen9ForCausalLM")
    assert "families.py" in str(caught.value)


def test_a_folder_is_found_as_it_is_named(tiny_target: Path) -> None:
    assert locate(str(tiny_target)) == tiny_target


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "word", "a/b/c"])
def test_what_cannot_be_a_hub_id_is_never_asked_of_the_hub(name: str) -> None:
    with pytest.raises(UserError, match="there is no model folder"):
        locate(name)


def test_a_hub_id_that_cannot_be_fetched_is_the_users_error() -> None:
    for find in (locate, locate_description, locate_config):
        with pytest.raises(UserError, match="neither a local folder nor a hub model"):
            find("nobody/no-such-model")


def test_a_machine_without_a_network_is_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HTTPError

    def nobody(*arguments: Any, **named: Any) -> None:
        raise HTTPError("[Errno -2] Name or service not known")  # as the hub's client: no OSError

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", nobody)
    with pytest.raises(UserError, match="neither a local folder nor a hub model") as caught:
        locate_description("nobody/no-such-model")
    assert "the network" in str(caught.value.hint)


@pytest.mark.parametrize("where", ["config", "generation config", "tokenizer"])
def test_an_end_that_only_one_file_names_is_an_end(target: Path, where: str) -> None:
    """Each file names an id that no other does, so that none can be left out."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(target)
    change_json(target / "config.json", eos_token_id=5)
    change_json(target / "generation_config.json", eos_token_id=[9])
    ends = {
        "config": 5,
        "generation config": 9,
        "tokenizer": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    }
    assert len(set(ends.values())) == 3
    assert spec_of(target).eos_token_ids == tuple(sorted(ends.values()))
    assert ends[where] in spec_of(target).eos_token_ids


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["</s>", [1, "2"], True])
def test_an_end_that_is_no_token_id_is_refused(target: Path, name: str, value: Any) -> None:
    path = target / name
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": value}))
    with pytest.raises(UserError, match=r"eos_token_id|cannot read"):
        spec_of(target)


def test_a_damaged_generation_config_is_named(target: Path) -> None:
    (target / "generation_config.json").write_text('{"eos_token_id": ')
    with pytest.raises(UserError, match=r"cannot read .*generation_config\.json"):
        spec_of(target)


def test_the_final_norm_is_computed_in_float32_whatever_the_states_are() -> None:
    """In bfloat16 the mean of squares of a wide row is off by a percent; targets compute it in float32."""
    torch.manual_seed(1)
    states = (torch.randn(8, 4096) * 8).bfloat16()
    for kind in ("rms", "rms_one_plus"):
        weight = torch.randn(4096).bfloat16()
        teacher = TeacherHead(weight, weight[None], weight[None], kind, 1e-6, None, 1.0)  # type: ignore[arg-type]
        wide = states.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        if kind == "rms":  # as Llama: rounded to the states' type, then multiplied
            expected = weight * normed.bfloat16()
        else:  # as Gemma: 1 + w and the product in float32, rounded once
            expected = (normed * (1.0 + weight.float())).bfloat16()
        assert torch.equal(teacher.normed(states), expected)
        assert teacher.normed(states).dtype == torch.bfloat16


def test_one_plus_a_small_weight_is_not_rounded_before_the_product() -> None:
    """In bfloat16 1 + 0.002 is 1: the weight would be lost."""
    weight = torch.full((64,), 0.002).bfloat16()
    teacher = TeacherHead(weight, weight[None], weight[None], "rms_one_plus", 1e-6, None, 1.0)
    states = torch.linspace(0.5, 2, 64).repeat(4, 1).bfloat16()
    lost = TeacherHead(torch.zeros_like(weight), weight[None], weight[None], "rms_one_plus", 1e-6, None, 1.0)
    assert not torch.equal(teacher.normed(states), lost.normed(states))


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-next", "phi"])
def test_the_teachers_norm_in_bfloat16_is_the_models_own_bit_for_bit(tmp_path: Path, name: str) -> None:
    folder = make_family(tmp_path / name, name, 4)
    spec = read_target(folder, TargetSettings(model=str(folder), dtype="bfloat16"))
    engine = TransformersEngine(folder, spec)
    teacher = read_teacher(folder, spec).to("cpu", torch.bfloat16)
    decoder = engine.model.get_decoder()
    norm = getattr(decoder, family_of(spec.architecture).final_norm)
    states = (torch.randn(16, spec.hidden_size) * 5).bfloat16()
    with torch.inference_mode():
        assert torch.equal(teacher.normed(states), norm(states))
