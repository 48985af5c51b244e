"""Kimi-K2.5 from the first command to the last, as tiny as its class allows.

Its recipe with another folder and other sizes runs through the real vLLM on two tensor-parallel ranks, the
experts dequantised: vLLM's CPU build has no kernel for experts in INT4 with a scale for each group of 32.
transformers computes them.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from eyas.config.load import load_config
from eyas.layer_ids import parse_layer_ids
from pipeline import eyas, write_prompts
from tiny_kimi import dequantised, make_kimi

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("vllm")]
RECIPE = Path(__file__).parents[2] / "recipes/kimi-k2.5.yaml"


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kimi(tmp_path_factory.mktemp("kimi") / "int4")


def sizes(root: Path, target: Path) -> list[str]:
    """Return what a run of the recipe on this machine changes: folders and sizes."""
    return [
        f"run_dir={root / 'run'}",
        f"target.model={target}",
        # The recipe's [3, 31, 59] of 61 layers, as far as four have them.
        f"target.aux_layer_ids={list(parse_layer_ids('0 1 2', 'output-of'))}",
        f"data.sources=[{write_prompts(root / 'prompts.jsonl')}]",
        "data.max_length=128",
        "data.validation_fraction=0.2",
        "regenerate.max_new_tokens=20",
        "extract.batch_tokens=256",
        "draft.vocab_size=120",
        "train.batch_tokens=256",
        "train.num_gpus=1",
        "train.compute_dtype=float32",
        "evaluate.num_prompts=3",
        "evaluate.max_new_tokens=12",
        "evaluate.concurrency=[1, 3]",
    ]


def report_of(root: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((root / "run" / "evaluation" / "report.json").read_text())
    return report


def test_the_layers_that_were_once_called_2_30_58_60() -> None:
    ids = parse_layer_ids("2 30 58 60", "output-of")
    assert ids == (3, 31, 59, 61)
    assert (*(load_config(RECIPE).config.target.aux_layer_ids or ()), 61) == ids


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_the_recipe_runs_from_the_first_stage_to_the_last(
    kimi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its kernels for latent attention on a CPU take heads of 576 only; plain attention takes these.
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    words = [*sizes(tmp_path, dequantised(kimi, tmp_path / "plain")), "vllm.tensor_parallel_size=2"]
    refused = eyas("run", "-c", RECIPE, *words)
    assert refused.code == 2
    assert "the draft's 1 attention heads and 1 key/value heads do not divide among" in refused.err
    screen = eyas("run", "-c", RECIPE, *words, "draft.num_attention_heads=2", "draft.num_key_value_heads=2")
    assert screen.code == 0, screen.err
    assert screen.err.count("the engine passed the probe") == 1
    assert screen.err.count("the engine that is running serves this stage too") == 1
    report = report_of(tmp_path)
    served = report["served"]
    assert served["deployment"] == {
        "prefix caching": "off",
        "chunked prefill": "on",
        "key/value cache": "float32",
        "weights": "float32",
    }
    assert served["agreement"]["broken"] == []
    assert served["agreement"]["compared"] == 3
    low, high = served["agreement"]["served"]
    assert low <= report["predicted"] <= high
    assert served["lossless"]["differences"] == []
    config = json.loads((tmp_path / "run" / "draft" / "config.json").read_text())
    assert config["eyas"]["target"]["architecture"] == "KimiK25ForConditionalGeneration"


def test_experts_in_int4_run_through_transformers_with_a_latent_draft(kimi: Path, tmp_path: Path) -> None:
    engines = [f"{stage}.engine=transformers" for stage in ("regenerate", "extract", "evaluate")]
    further = ["evaluate.in_process=true", "evaluate.concurrency=[1, 2, 4, 8, 16, 32, 64]"]
    words = [*sizes(tmp_path, kimi), *engines, *further, "draft.attention=mla", "vllm.tensor_parallel_size=1"]
    screen = eyas("run", "-c", RECIPE, *words)
    assert screen.code == 0, screen.err
    report = report_of(tmp_path)
    assert report["predicted"] == report["acceptance"]
    config = json.loads((tmp_path / "run" / "draft" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    printed = eyas("serve", tmp_path / "run" / "draft", "--print", "--trust-remote-code")
    assert "--trust-remote-code" in printed.out, printed.err
