"""What exports of block drafts say, and that none of them falls into an engine's silent traps."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from block_cases import make_block_case
from eyas import registry
from eyas.config.schema import draft_settings_of
from eyas.drafters.common.block.model import BlockDraft
from eyas.engines.info import DraftServer, check_layers, engine_info
from eyas.errors import ContractError, UserError
from eyas.export.native import load_export
from eyas.export.read import read_draft
from eyas.layer_ids import ReadLayers
from eyas.types import VocabMap
from tiny import make_spec

KINDS = ("dflash", "dspark")
SETTINGS: dict[str, dict[str, Any]] = {
    "causal, window": {},
    "bidirectional, no window": {"causal": False, "window": None},
    "part of the vocabulary": {"draft_vocab": 29},
    "logits that the target scales": {"logit_scale": 0.25},
    "scaled positions": {"rope": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
}
AUX_LAYER_IDS = (2, 4, 6)


def export(folder: Path, kind: str, form: str = "native", **settings: Any) -> tuple[BlockDraft, Path]:
    case = make_block_case(kind, **settings)
    spec = make_spec(
        vocab_size=61, hidden_size=32, num_layers=8, aux_layer_ids=AUX_LAYER_IDS, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    )  # fmt: skip
    folder.mkdir(parents=True)
    exporter = registry.resolve(registry.EXPORTERS, form, "export format")(kind)
    vocab = VocabMap(case.target_ids.numpy(), 61)
    exporter.write(folder, case.draft, spec, vocab)
    exporter.verify(folder, case.draft, vocab, case.aux[:7], torch.arange(7))
    return case.draft, folder


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def change(folder: Path, *path: str, value: Any) -> None:
    """Set a key of config.json, or remove it (``...``)."""
    config = config_of(folder)
    place = config
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        place.pop(path[-1])
    else:
        place[path[-1]] = value
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("form", ["native", "speculators"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_read_back_as_the_same_draft(
    tmp_path: Path, kind: str, form: str, settings: dict[str, Any]
) -> None:
    draft, folder = export(tmp_path / "draft", kind, form, **settings)
    stored = read_draft(folder)
    assert (stored.architecture, stored.shape) == (kind, draft.config)
    assert stored.aux_layer_ids == AUX_LAYER_IDS
    teacher = make_block_case(kind, **settings).teacher
    again, target_ids, _ = load_export(folder, teacher.embedding, teacher.head)
    state = draft.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
    assert len(target_ids) == draft.config.vocab_size


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_have_the_names_that_engines_load(tmp_path: Path, kind: str) -> None:
    _, folder = export(tmp_path / "draft", kind)
    found = load_file(folder / "model.safetensors").keys()
    layer = [
        "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
        "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj",
        "mlp.up_proj", "mlp.down_proj",
    ]  # fmt: skip
    expected = {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    expected |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    if kind == "dspark":
        expected |= {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
        expected |= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert set(found) == expected
    _, reduced = export(tmp_path / "reduced", kind, draft_vocab=29)
    assert load_file(reduced / "model.safetensors").keys() - found == {"lm_head.weight", "d2t", "t2d"}


@pytest.mark.parametrize("kind", KINDS)
def test_old_keys_of_positions_say_what_the_new_one_says(tmp_path: Path, kind: str) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    config = config_of(export(tmp_path / "scaled", kind, rope=rope)[1])
    assert (config["rope_parameters"], config["rope_theta"]) == (rope, 500.0)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    plain = config_of(export(tmp_path / "plain", kind)[1])
    assert plain["rope_scaling"] is None
    assert plain["rope_theta"] == plain["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_block_draft_lacks_is_said_to_be_lacking(tmp_path: Path, kind: str) -> None:
    config = config_of(export(tmp_path / "native", kind)[1])
    assert [config[key] for key in ("attention_bias", "tie_word_embeddings")] == [False, False]
    assert config["is_neox_style"] is True
    # Layers from this one on have the window: all of them.
    assert config["max_window_layers"] == 0
    assert config_of(export(tmp_path / "other", kind, "speculators")[1])["tie_word_embeddings"] is False


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_whose_lists_of_layers_disagree_is_not_reported_as_done(tmp_path: Path, kind: str) -> None:
    check = registry.drafter_file(kind, "export").check_config
    config = config_of(export(tmp_path / "draft", kind)[1])
    check(config)
    with pytest.raises(ContractError, match="two lists of aux layer ids"):
        check(config | {"eagle_aux_hidden_state_layer_ids": [2, 4, 7]})
    with pytest.raises(ContractError, match="causal"):
        check(config | {"is_causal": not config["is_causal"]})


@pytest.mark.parametrize(
    ("form", "changes", "causal"),
    [
        # Each line removes what engines ask first, so that the next key decides.
        ("native", {"is_causal": ...}, True),
        ("native", {"is_causal": ..., "dflash_config.causal": False}, False),
        ("native", {"is_causal": ..., "dflash_config.causal": ...}, True),  # sliding layers
        ("speculators", {"transformer_layer_config.is_causal": ...}, True),
        ("speculators", {"transformer_layer_config.is_causal": ..., "sliding_window_non_causal": ...}, False),
    ],
)
def test_a_draft_from_elsewhere_is_read_with_the_causality_that_vllm_takes(
    tmp_path: Path, form: str, changes: dict[str, Any], causal: bool
) -> None:
    _, folder = export(tmp_path / "draft", "dflash", form)
    for key, value in changes.items():
        change(folder, *key.split("."), value=value)
    assert read_draft(folder).shape.causal is causal


def test_layers_that_do_not_slide_are_not_causal_where_no_key_says_it(tmp_path: Path) -> None:
    _, folder = export(tmp_path / "draft", "dflash", causal=False, window=None)
    change(folder, "is_causal", value=...)
    change(folder, "dflash_config", "causal", value=...)
    assert read_draft(folder).shape.causal is False


# Trap (a): engines ask different keys for causality, and fall back on the type of each layer.
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [9, None])
@pytest.mark.parametrize("kind", KINDS)
def test_causality_is_the_same_under_every_key_and_layers_are_alike(
    tmp_path: Path, kind: str, window: int | None, causal: bool
) -> None:
    _, folder = export(tmp_path / "native", kind, causal=causal, window=window)
    config = config_of(folder)
    assert config["is_causal"] is config["dflash_config"]["causal"] is causal
    assert config["layer_types"] == 2 * ["full_attention" if window is None else "sliding_attention"]
    # Qwen3's configuration drops a window that use_sliding_window does not confirm.
    assert (config["sliding_window"], config["use_sliding_window"]) == (window, window is not None)
    assert config["dflash_config"].get("swa_window_size") == window
    assert config["dflash_config"]["use_swa"] is (window is not None)

    _, folder = export(tmp_path / "speculators", kind, "speculators", causal=causal, window=window)
    config = config_of(folder)
    assert config["sliding_window_non_causal"] is not causal
    assert config["transformer_layer_config"]["is_causal"] is causal


def test_keys_of_causality_that_disagree_fail_the_verification(tmp_path: Path) -> None:
    draft, folder = export(tmp_path / "draft", "dflash")
    change(folder, "dflash_config", "causal", value=False)
    exporter = registry.resolve(registry.EXPORTERS, "native", "export format")("dflash")
    vocab = VocabMap(torch.arange(61).numpy(), 61)
    with pytest.raises(ContractError, match=r"is_causal and dflash_config\.causal"):
        exporter.verify(folder, draft, vocab, torch.zeros(1, 3, 32), torch.ones(1).long())


def test_a_draft_whose_layers_differ_is_refused(tmp_path: Path) -> None:
    _, folder = export(tmp_path / "draft", "dflash")
    change(folder, "layer_types", value=["full_attention", "sliding_attention"])
    with pytest.raises(UserError, match="differ in window or causality"):
        read_draft(folder)


# Trap (b): a rotary layout that differs is silent.
@pytest.mark.parametrize("kind", KINDS)
def test_the_rotary_layout_is_written_and_another_one_is_refused(tmp_path: Path, kind: str) -> None:
    _, folder = export(tmp_path / "draft", kind)
    config = config_of(folder)
    assert config["is_neox_style"] is True
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    change(folder, "is_neox_style", value=False)
    with pytest.raises(UserError, match="rotates neighbours"):
        read_draft(folder)


# Trap (c): a draft is good at what the chat template made; the fingerprint says which one that was.
@pytest.mark.parametrize("form", ["native", "speculators"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_chat_template_of_the_training_is_recorded(tmp_path: Path, kind: str, form: str) -> None:
    _, folder = export(tmp_path / "draft", kind, form)
    assert config_of(folder)["eyas"]["target"]["template_fingerprint"] == "template"


# Trap (d): vLLM computes no more slots than it drafts; a bidirectional draft misses the others.
@pytest.mark.parametrize("form", ["native", "speculators"])
@pytest.mark.parametrize(("kind", "held"), [("dflash", 4), ("dspark", 5)])
def test_vllm_drafts_from_the_whole_block_or_from_a_causal_one(
    tmp_path: Path, kind: str, held: int, form: str
) -> None:
    _, causal = export(tmp_path / "causal", kind, form)
    _, both_ways = export(tmp_path / "bidirectional", kind, form, causal=False)
    vllm = engine_info("vllm").draft_file(kind)
    for num in (1, held):
        told = vllm.speculative_config(str(causal), num)
        assert told == {"method": kind, "model": str(causal), "num_speculative_tokens": num}
    assert vllm.speculative_config(str(both_ways), held)["num_speculative_tokens"] == held
    with pytest.raises(UserError, match="shorter block than the 5 slots") as caught:
        vllm.speculative_config(str(both_ways), held - 1)
    assert "draft.causal=true" in str(caught.value.hint)
    with pytest.raises(UserError, match=f"holds {held} draft tokens, {held + 1} were asked for"):
        vllm.speculative_config(str(causal), held + 1)


# The same in SGLang, which logs a warning and drafts from the other block.
@pytest.mark.parametrize(("kind", "held"), [("dflash", 4), ("dspark", 5)])
def test_sglang_drafts_from_the_whole_block_or_from_a_causal_one(
    tmp_path: Path, kind: str, held: int
) -> None:
    _, causal = export(tmp_path / "causal", kind)
    _, both_ways = export(tmp_path / "bidirectional", kind, causal=False)
    sglang = engine_info("sglang")

    def served(draft: Path, num_draft_tokens: int) -> list[str]:
        return sglang.serve_command(
            DraftServer(draft, kind, "target", num_draft_tokens, "bfloat16", "host", 1, 1, 0.9), on_cpu=False
        )

    for draft, num in ((causal, 1), (causal, held), (both_ways, held)):
        given = dict(itertools.pairwise(served(draft, num)))
        assert given["--speculative-num-draft-tokens"] == str(num + 1)
        # Without it DSpark takes config.json's block, and refuses another number of tokens.
        assert given.get("--speculative-dspark-block-size") == (str(num) if kind == "dspark" else None)
    with pytest.raises(UserError, match=r"SGLang would draft .* shorter block than the 5 slots"):
        served(both_ways, held - 1)
    with pytest.raises(UserError, match=f"holds {held} draft tokens, {held + 1} were asked for"):
        served(causal, held + 1)


# Trap (e): SGLang counts the token that verification starts from.
@pytest.mark.parametrize("kind", KINDS)
def test_sglang_is_told_one_token_more(kind: str) -> None:
    words = registry.drafter_file(kind, "sglang").arguments("folder", 4)
    assert words[:4] == [
        "--speculative-algorithm", kind.upper(), "--speculative-draft-model-path", "folder",
    ]  # fmt: skip
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "5"


@pytest.mark.parametrize("kind", KINDS)
def test_sglang_serves_whole_vocabularies_and_layers_above_the_embedding(tmp_path: Path, kind: str) -> None:
    whole, _ = export(tmp_path / "whole", kind)
    some, _ = export(tmp_path / "some", kind, draft_vocab=29)
    sglang = engine_info("sglang")
    assert sglang.draft_trouble(kind, whole.config, None) is None
    assert "draft.vocab_size=null" in str(sglang.draft_trouble(kind, some.config, None))
    with pytest.raises(UserError, match="aux layer 0"):
        check_layers(kind, ReadLayers((0, 2), "LlamaForCausalLM", 8))


@pytest.mark.parametrize("kind", KINDS)
def test_aux_layers_are_written_in_both_conventions_and_must_agree(tmp_path: Path, kind: str) -> None:
    _, folder = export(tmp_path / "draft", kind)
    config = config_of(folder)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert config["dflash_config"]["target_layer_ids"] == [1, 3, 5]
    assert config.get("target_layer_ids") == ([1, 3, 5] if kind == "dspark" else None)
    assert config["num_target_layers"] == 8
    change(folder, "eagle_aux_hidden_state_layer_ids", value=[1, 3, 5])
    with pytest.raises(UserError, match=r"different aux layers: \[1, 3, 5\] and \[2, 4, 6\]"):
        read_draft(folder)


def test_whether_the_anchors_slot_predicts_is_always_written(tmp_path: Path) -> None:
    for form in ("native", "speculators"):
        _, dflash = export(tmp_path / f"dflash-{form}", "dflash", form)
        _, dspark = export(tmp_path / f"dspark-{form}", "dspark", form)
        assert config_of(dflash)["sample_from_anchor"] is False
        assert config_of(dspark)["sample_from_anchor"] is True
        # Absent it means false in this format, true in the native one.
        change(dspark, "sample_from_anchor", value=...)
        if form == "speculators":
            with pytest.raises(UserError, match="predicts nothing from its anchor's slot"):
                read_draft(dspark)
        else:
            assert read_draft(dspark).architecture == "dspark"
    _, folder = export(tmp_path / "odd", "dflash")
    change(folder, "dflash_config", "sample_from_anchor", value=True)
    with pytest.raises(UserError, match="predicts from its anchor's slot"):
        read_draft(folder)


def test_a_server_starts_with_as_many_draft_tokens_as_a_block_holds(tmp_path: Path) -> None:
    for kind, held in (("dflash", 4), ("dspark", 5)):
        _, folder = export(tmp_path / kind, kind, "speculators")
        config = config_of(folder)
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == held
        assert config["mask_token_id"] == 59


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("dflash_config", "projector_type"), "domino", "projector of another kind"),
        (("attention_bias",), True, "biases in its attention"),
        (("quantization_config",), {"bits": 4}, "quantised"),
        (("markov_head_type",), "gated", "gated Markov head"),
        (("enable_confidence_head",), False, "lacks the confidence head"),
    ],
)
def test_what_eyas_does_not_compute_is_refused_by_name(
    tmp_path: Path, path: tuple[str, ...], value: Any, said: str
) -> None:
    _, folder = export(tmp_path / "draft", "dspark")
    change(folder, *path, value=value)
    with pytest.raises(UserError, match=said):
        read_draft(folder)


def test_a_reduced_vocabulary_needs_its_map_and_a_whole_one_has_none(tmp_path: Path) -> None:
    _, some = export(tmp_path / "some", "dflash", draft_vocab=29)
    tensors = load_file(some / "model.safetensors")
    for missing in ("d2t", "lm_head.weight"):
        save_file({n: t for n, t in tensors.items() if n != missing}, some / "model.safetensors")
        with pytest.raises(ContractError, match=f"29 of 61 ids but has no {missing}"):
            read_draft(some)
    _, whole = export(tmp_path / "whole", "dflash")
    tensors = load_file(whole / "model.safetensors") | {"d2t": torch.zeros(61, dtype=torch.long)}
    save_file(tensors, whole / "model.safetensors")
    with pytest.raises(ContractError, match="has a d2t"):
        read_draft(whole)


def test_deepseeks_own_draft_is_not_taken_for_one_of_ours(tmp_path: Path) -> None:
    _, folder = export(tmp_path / "draft", "dspark")
    change(folder, "architectures", value=["DSparkDraftModel"])
    with pytest.raises(UserError, match="no draft that eyas knows"):
        read_draft(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_those_of_the_field(kind: str) -> None:
    settings: Any = draft_settings_of(kind)()
    assert (settings.num_layers, settings.num_anchors, settings.sliding_window) == (5, 64, 2048)
    assert settings.causal is True
    assert settings.vocab_size is settings.mask_token_id is None
    assert settings.block_size == (16 if kind == "dflash" else 7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_smaller_than_a_block_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="a slot must see its whole block"):
        draft_settings_of(kind)(sliding_window=4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_id_without_a_row_is_refused_before_work_is_done(kind: str) -> None:
    settings = draft_settings_of(kind)(mask_token_id=61)
    with pytest.raises(UserError, match="no row in the target's embedding of 61 rows") as caught:
        registry.drafter(kind).config_for(make_spec(vocab_size=61), settings, 61)
    assert "below 61" in str(caught.value.hint)
