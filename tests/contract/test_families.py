"""Every supported architecture, as a tiny model of its true class: description, teacher, layers, training."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.engines.base import Prompt, Sampling
from eyas.engines.hidden_state_hooks import HiddenStateHooks
from eyas.engines.transformers.engine import TransformersEngine
from eyas.export.native import NativeExporter, load_export
from eyas.targets.architectures import FAMILIES
from eyas.targets.quantized import read_weight
from eyas.targets.teacher import read_last_layer, read_teacher
from eyas.targets.weights import Weights
from families import TINY, make_family, quantise_experts, shard_weights
from tiny import answered_states, make_trainer, random_samples, spec_of

NAMES = sorted(TINY)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: make_family(root / name, name) for name in NAMES}


def test_every_architecture_in_the_table_has_a_tiny_model_that_is_tested() -> None:
    tested = {tiny.released_as or tiny.architecture for tiny in TINY.values()}
    tested |= {tiny.architecture for tiny in TINY.values()}
    # The same model with experts, inside the same wrapper.
    assert set(FAMILIES) - tested == {"Qwen3_5MoeForConditionalGeneration"}


@pytest.mark.parametrize("name", NAMES)
def test_a_target_is_described_by_its_own_files(folders: dict[str, Path], name: str) -> None:
    tiny, spec = TINY[name], spec_of(folders[name])
    assert spec.architecture == (tiny.released_as or tiny.architecture)
    assert (spec.hidden_size, spec.vocab_size, spec.num_layers, spec.dtype) == (128, 300, 4, "float32")
    assert (spec.norm_kind, spec.logit_softcap, spec.tied_head) == (tiny.norm_kind, tiny.softcap, tiny.tied)
    assert spec.logit_scale == pytest.approx(tiny.scale)
    assert spec.num_attention_heads == 4
    assert (spec.latent_attention is not None) == ("kv_lora_rank" in tiny.settings)
    assert type(spec).from_json(spec.to_json()) == spec


@pytest.mark.parametrize("name", NAMES)
def test_the_teacher_rebuilt_from_last_gives_the_models_own_logits(
    folders: dict[str, Path], name: str
) -> None:
    spec = spec_of(folders[name], aux_layer_ids=(0, 1, 2, 3))
    teacher = read_teacher(folders[name], spec)
    engine = TransformersEngine(folders[name], spec)
    ids = torch.randint(3, spec.vocab_size, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        out = engine.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    sample = next(s for s in random_samples(9, 300, longest=30) if s.supervised.sum() > 4)
    (states,) = engine.capture([sample])
    own = engine.model(input_ids=torch.from_numpy(sample.input_ids).long()[None], use_cache=False).logits[0]
    expected = own[torch.from_numpy(sample.supervised)]
    torch.testing.assert_close(teacher.logits(states.last), expected, rtol=2e-4, atol=2e-4)
    assert float(expected.std()) > 0.05  # not a comparison of zeros

    # Ids mean the index of transformers' own hidden_states, whose last entry is after the norm.
    with torch.inference_mode(), HiddenStateHooks(engine.model, (0, 1, 2, 3, 4)) as taps:
        engine.model(input_ids=ids, use_cache=False)
    hidden = torch.stack(out.hidden_states[:4], dim=2)
    torch.testing.assert_close(taps.stacked()[:, :, :4], hidden, rtol=1e-5, atol=1e-5)
    last = taps.stacked()[:, :, 4]
    torch.testing.assert_close(teacher.normed(last), out.hidden_states[4], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_learns_from_the_target_and_its_export_loads(
    folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    folder = folders[name]
    spec = spec_of(folder)
    engine = TransformersEngine(folder, spec)
    states = answered_states(engine, 12, 12)
    trainer = make_trainer(
        tmp_path, folder, states[:9], states[9:], num_epochs=6, batch_tokens=96, learning_rate=5e-3
    )
    trainer.run()
    losses = [row["loss"] for row in trainer.history if "learning_rate" in row]
    assert losses[-1] < 0.9 * losses[0]
    exported = tmp_path / "export"
    exported.mkdir()
    NativeExporter("eagle3").write(exported, trainer.draft, spec, trainer.vocab)
    tokens = torch.from_numpy(states[0].sample.input_ids[1:]).long()
    NativeExporter("eagle3").verify(
        exported, trainer.draft, trainer.vocab, states[0].aux[: len(tokens)], tokens
    )
    _, _, config = load_export(exported, trainer.teacher.embedding)
    assert config["max_position_embeddings"] == 512


@pytest.mark.parametrize("name", ["gemma3-wrapped", "qwen3.5-wrapped", "kimi-k2.5", "llama-tied", "phimoe"])
@pytest.mark.parametrize("with_index", [True, False])
def test_weights_in_many_files_are_the_same_target(tmp_path: Path, name: str, with_index: bool) -> None:
    folder = make_family(tmp_path / name, name)
    spec, whole = spec_of(folder), read_teacher(folder, spec_of(folder))
    shard_weights(folder, 3, with_index)
    teacher = read_teacher(folder, spec_of(folder))
    assert torch.equal(teacher.head, whole.head)
    assert torch.equal(teacher.norm_weight, whole.norm_weight)
    assert read_last_layer(folder, spec).keys() >= {"input_layernorm.weight"}


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_does_not_depend_on_its_batch(folders: dict[str, Path], name: str) -> None:
    engine = TransformersEngine(folders[name], spec_of(folders[name]))
    prompts = [Prompt(f"p{n}", tuple(range(5, 5 + n))) for n in (3, 9, 17)]
    together = {a.prompt_id: a for a in engine.generate(prompts, Sampling(8))}
    for prompt in prompts:
        assert list(engine.generate([prompt], Sampling(8))) == [together[prompt.prompt_id]]
        session = engine.session()
        logits, _ = session.extend(prompt.token_ids, num_logits=1)
        assert together[prompt.prompt_id].token_ids[0] == int(logits[-1].argmax())


def test_a_cap_on_attention_scores_is_computed(folders: dict[str, Path]) -> None:
    engine = TransformersEngine(folders["gemma2"], spec_of(folders["gemma2"]))
    assert engine.model.config.attn_logit_softcapping
    assert engine.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3", "kimi-k2.5"])
def test_experts_in_int4_are_the_engines_business(tmp_path: Path, name: str) -> None:
    pytest.importorskip("compressed_tensors")
    folder = quantise_experts(make_family(tmp_path / name, name))
    samples = random_samples(6, 300)
    spec, weights = spec_of(folder), Weights(folder)
    plain = make_family(tmp_path / "plain", name)
    tensors = load_file(plain / "model.safetensors")
    packed = [n.removesuffix("_packed") for n in weights.file_of if n.endswith("weight_packed")]
    assert len(packed) >= 3 * 4 * 3  # layers, experts, projections
    for full in packed:
        tensors[full] = read_weight(weights, full.removesuffix(".weight"), torch.float32)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    known = {s.sample.sample_id: s for s in TransformersEngine(plain, spec_of(plain)).capture(samples)}
    teacher = read_teacher(folder, spec)
    engine = TransformersEngine(folder, spec)
    for states in engine.capture(samples):
        torch.testing.assert_close(states.last, known[states.sample.sample_id].last, rtol=1e-3, atol=1e-3)
        ids = torch.from_numpy(states.sample.input_ids).long()[None]
        own = engine.model(input_ids=ids, use_cache=False).logits[0]
        expected = own[torch.from_numpy(states.sample.supervised)]
        torch.testing.assert_close(teacher.logits(states.last), expected, rtol=2e-4, atol=2e-4)
    states = list(engine.capture(samples))
    trainer = make_trainer(tmp_path / "train", folder, states[:4], states[4:], num_epochs=1)
    trainer.run()
    (tmp_path / "export").mkdir()
    NativeExporter("eagle3").write(tmp_path / "export", trainer.draft, spec, trainer.vocab)
    assert "quantization_config" not in (tmp_path / "export" / "config.json").read_text()


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_a_model_with_a_running_state_is_decoded_without_a_cache(folders: dict[str, Path], name: str) -> None:
    spec = spec_of(folders[name])
    engine = TransformersEngine(folders[name], spec)
    session = engine.session()
    whole, states = session.extend(list(range(3, 20)))
    session.truncate(10)
    again, states_again = session.extend(list(range(13, 20)))
    torch.testing.assert_close(again, whole[10:])
    torch.testing.assert_close(states_again, states[10:])
    (answer,) = engine.generate([Prompt("p", tuple(range(3, 20)))], Sampling(8))
    assert answer.token_ids[0] == int(whole[-1].argmax())
