"""Estimates that need no run: shapes from config.json, bytes, memory, given rates."""

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.config.load import load_config
from eyas.config.schema import TargetSettings
from eyas.drafters.eagle3.config import draft_config_for
from eyas.drafters.eagle3.drafter import DRAFTER
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.errors import UserError
from eyas.plan import estimates
from eyas.plan.measure_rates import speed_up_once_trained
from eyas.plan.target_size import count_parameters, read_target_size
from eyas.progress_displays import size
from eyas.stages.plan import plan
from eyas.stages.run_context import RunContext
from tiny import make_spec

# The text model of Kimi-K2.5, as its public config.json describes it.
KIMI: dict[str, Any] = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
    "vocab_size": 163840, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "dtype": "bfloat16",
    "quantization_config": {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}},
}  # fmt: skip
LLAMA_8B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "intermediate_size": 14336, "dtype": "bfloat16",
}  # fmt: skip


def write_config(folder: Path, text: dict[str, Any], nested: bool = False) -> Path:
    folder.mkdir()
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text} if nested else {
        "architectures": ["LlamaForCausalLM"], **text}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def planned(target: Path, *settings: str, **arguments: Any) -> Any:
    run_dir = target.parent / "runs" / "new"
    fixed = (f"run_dir={run_dir}", f"target.model={target}", "data.sources=[nowhere.jsonl]")
    return plan(RunContext(load_config(None, (*fixed, *settings))), **arguments)


def test_parameters_of_known_models_are_what_their_makers_say() -> None:
    assert count_parameters(LLAMA_8B)[0] == pytest.approx(8.03e9, rel=0.01)
    total, routed = count_parameters(KIMI)
    assert total == pytest.approx(1.026e12, rel=0.01)
    assert 0.98 < routed / total < 1


def test_a_kimi_sized_recipe_is_planned_from_its_config_alone(tmp_path: Path) -> None:
    target = write_config(tmp_path / "kimi", KIMI, nested=True)
    found = planned(
        target, "target.aux_layer_ids=[2,30,58]", "extract.engine=vllm", "vllm.tensor_parallel_size=8",
        "data.validation_fraction=0.01", "train.num_epochs=1",
        tokens=500_000_000, rates=["extract=2280", "train=50000"], gpu_memory=141,
    )  # fmt: skip
    assert found.bytes_per_token == 57344
    assert found.shape.kv_bytes_per_token == pytest.approx(70_000, rel=0.01)
    assert 500e9 < found.shape.weight_bytes < 650e9
    extract = next(s for s in found.stages if s.stage == "extract")
    assert extract.seconds == pytest.approx(500e6 / 2280)
    assert extract.basis == "given: 2,280 tokens/s"
    states = next(n for n in found.disk if n.what == "states" or "states" in n.basis)
    # Half of the tokens supervised: three aux layers of each token, the last layer of half of them.
    assert states.bytes == pytest.approx(500e6 * 3.5 * 7168 * 2, rel=0.01)
    whole = found.disk[-1]
    assert whole.fits is False
    engine = found.memory[0]
    assert engine.bytes > found.shape.weight_bytes / 8
    assert "57 KB states" in engine.basis
    assert engine.fits, "eight cards of 141 GiB hold it"
    assert planned(target, "extract.engine=vllm", tokens=1000, gpu_memory=80).memory[0].fits is False
    assert any(s.seconds is None for s in found.stages)  # nothing tells how fast the target answers
    assert found.seconds is None
    # Validating 5 M tokens every hundred steps would cost more than training does.
    assert any("validation is" in note for note in found.notes)
    assert json.loads(json.dumps(found.to_json()))["tokens"]["train"] == pytest.approx(495e6)


def test_draft_parameters_are_those_of_the_real_draft() -> None:
    for fc_norm in (False, True):
        config = draft_config_for(make_spec(), 30, fc_norm=fc_norm)
        real = sum(p.numel() for p in Eagle3Draft(config).trainable().values())
        assert estimates.draft_parameters(estimates.PlannedDraft(DRAFTER, config)) == real


@pytest.mark.parametrize(
    ("optimizer", "batch_tokens", "supervised", "measured_gib"),
    [
        ("adamw", 8192, 0.5, 14.8),
        ("adamw", 8192, 0.9, 18.7),
        ("adamw", 32768, 0.25, 22.4),
        ("muon", 8192, 0.5, 13.7),
    ],
)
def test_training_memory_is_within_a_quarter_of_what_a_gpu_took(
    tmp_path: Path, optimizer: str, batch_tokens: int, supervised: float, measured_gib: float
) -> None:
    """MeasuredRates on one H200: benchmarks/LOG.md, training speed."""
    shape = read_target_size(TargetSettings(model=str(write_config(tmp_path / "llama", LLAMA_8B))))
    settings = ("run_dir=r", "target.model=m", "data.sources=[a]", "train.compute_dtype=bfloat16",
                f"train.batch_tokens={batch_tokens}", f"train.optimizer={optimizer}")  # fmt: skip
    config = load_config(None, settings).config
    draft = estimates.PlannedDraft(DRAFTER, draft_config_for(shape.spec, 32000))
    found = estimates.training_memory(config, draft, shape, supervised)
    assert found / 2**30 == pytest.approx(measured_gib, rel=0.25)


def test_muon_keeps_a_moment_less_of_each_matrix(tmp_path: Path) -> None:
    target = write_config(tmp_path / "llama", LLAMA_8B)
    adamw, muon = (planned(target, f"train.optimizer={o}", tokens=1000) for o in ("adamw", "muon"))
    assert (adamw.memory[1].bytes - muon.memory[1].bytes) / 2**30 == pytest.approx(1.09, abs=0.01)  # measured


def test_slices_of_a_kimi_sized_draft_leave_room_and_the_plan_says_so(tmp_path: Path) -> None:
    target = write_config(tmp_path / "kimi", KIMI, nested=True)
    settings = (
        "draft.num_layers=4",
        "draft.vocab_size=null",
        "train.batch_tokens=1",
        "train.compute_dtype=bfloat16",
        "train.optimizer=adamw",
    )
    whole = planned(target, *settings, "train.num_gpus=8", "train.batches_per_step=8", tokens=1000)
    sliced = planned(
        target, *settings, "train.num_gpus=8", "train.batches_per_step=8", "train.shard=true", tokens=1000
    )
    parameters = whole.draft_parameters
    head = 163840 * 7168  # the largest parameter: the whole vocabulary
    saved = whole.memory[1].bytes - sliced.memory[1].bytes
    assert saved == pytest.approx(parameters * (18 - 2 * 2 - 16 / 8) - 4 * head)
    assert "slices over 8 GPUs" in sliced.memory[1].basis
    assert (
        planned(target, *settings, "train.shard=true", tokens=1000).memory[1].bytes == whole.memory[1].bytes
    )


def test_a_target_that_a_run_would_refuse_is_planned_and_said(tmp_path: Path) -> None:
    found = planned(write_config(tmp_path / "llama", LLAMA_8B), tokens=1000, rates=["extract=10"])
    assert found.notes
    assert found.notes[0].startswith("the run would be refused: ")


def test_a_config_without_a_shape_is_refused(tmp_path: Path) -> None:
    target = write_config(tmp_path / "empty", {"hidden_size": 8})
    with pytest.raises((UserError, KeyError)):
        read_target_size(TargetSettings(model=str(target)))


@pytest.mark.parametrize(("number", "text"), [(57344, "57.3 KB"), (3.3e13, "33 TB"), (12, "12 B")])
def test_sizes_as_a_person_says_them(number: float, text: str) -> None:
    assert size(number) == text


def test_a_stream_is_planned_with_captures_in_every_epoch_and_only_held_out_states_on_disk(
    tmp_path: Path,
) -> None:
    model = write_config(tmp_path / "model", LLAMA_8B)
    settings = [f"run_dir={tmp_path / 'run'}", f"target.model={model}", "data.sources=[x.jsonl]",
                "data.validation_fraction=0.1", "train.num_epochs=2", "draft.vocab_size=32000"]  # fmt: skip
    rates = ["extract=1000", "train=5000", "prepare=1", "regenerate=1", "evaluate=1"]
    plans = [
        plan(RunContext(load_config(None, [*settings, f"train.source={source}"])), rates, tokens=1_000_000)
        for source in ("store", "stream")
    ]
    stored, streamed = ({s.stage: s for s in p.stages} for p in plans)
    assert stored["extract"].seconds == pytest.approx(1000)
    assert streamed["extract"].seconds == pytest.approx(100)
    assert stored["train"].seconds is not None
    assert streamed["train"].seconds == pytest.approx(stored["train"].seconds + 2 * 900)
    assert "1,800,000 tokens captured" in streamed["train"].work
    disk = [p.disk[0].bytes for p in plans]
    assert disk[1] == pytest.approx(0.1 * disk[0], rel=1e-6)
    training = [p.memory[1].bytes for p in plans]
    assert training[1] == training[0] + plans[1].memory[0].bytes, "the engine stays beside the trainer"
    assert plans[1].memory[2].bytes == 4 << 30
    kept = [*settings, "train.source=stream", "train.keep_states=true"]
    keeping = plan(RunContext(load_config(None, kept)), rates, tokens=1_000_000)
    assert "900,000 tokens captured" in next(s.work for s in keeping.stages if s.stage == "train")
    assert keeping.disk[0].bytes == disk[0]
    ranks = [*settings, "train.source=stream", "train.num_gpus=2", "train.batches_per_step=2"]
    shared = plan(RunContext(load_config(None, ranks)), rates, tokens=1_000_000)
    steps = next(s.seconds for s in plans[0].stages if s.stage == "train")
    assert next(s.seconds for s in shared.stages if s.stage == "train") == pytest.approx(
        steps + 900, rel=0.01
    )
    beside = [*settings, "train.source=stream", "extract.fleet={replicas: 2}"]
    fleet = plan(RunContext(load_config(None, beside)), rates, tokens=1_000_000)
    assert next(s.seconds for s in fleet.stages if s.stage == "train") == pytest.approx(2 * 900)
    assert fleet.memory[1].bytes == training[0]


def test_the_trial_of_an_untrained_draft_is_not_taken_for_a_trained_ones_speed() -> None:
    trial = {"plain_tokens_per_s": 16.0, "drafted_tokens_per_s": 10.0, "acceptance": 1.0, "served": None}
    # A token takes 1/16 + 1/10 s there; with 1.5 tokens a round 1/16 + 1/15.
    assert speed_up_once_trained(trial) == pytest.approx((1 / 16 + 1 / 10) / (1 / 16 + 1 / 15))
    for known in ({"acceptance": 2.0}, {"acceptance": None}, {"served": {"points": []}}):
        assert speed_up_once_trained(trial | known) == 1.0
