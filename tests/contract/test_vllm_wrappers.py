"""Wrappers of several modalities: vLLM captures, regenerates and serves their text models."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.xdist_group("vllm"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
ROOT, SUPPORT = Path(__file__).parents[2], Path(__file__).parents[1] / "support"
FLOAT32 = ("llama4-wrapped", "mistral3-wrapped", "gemma3-wrapped", "kimi-k2.5")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    script, folder = SUPPORT / "wrapped_in_vllm.py", tmp_path_factory.mktemp("wrapped")
    changed = {
        "PYTHONPATH": os.pathsep.join(map(str, (SUPPORT, SUPPORT / "vision_stub", ROOT / "src"))),
        "VLLM_LOGGING_LEVEL": "ERROR",
        # Its kernels for latent attention on a CPU take heads of 576 only; plain attention takes these.
        "VLLM_MLA_DISABLE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(folder)],
        env=os.environ | changed,
        capture_output=True,
        text=True,
        timeout=600,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert done.returncode == 0, done.stderr[-3000:]
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize("name", FLOAT32)
def test_a_wrapper_is_captured_and_answers_as_in_transformers(
    found: dict[str, dict[str, Any]], name: str
) -> None:
    row = found[name]
    assert row["way"] == ("worker" if name.startswith("gemma3") else "native")
    assert row["difference"] < 1e-5
    assert row["regenerated"] == 6


def test_a_hybrid_wrapper_in_bfloat16_is_captured_and_answers(found: dict[str, dict[str, Any]]) -> None:
    row = found["qwen3.5-wrapped"]
    assert (row["way"], row["dtype"]) == ("native", "bfloat16")
    assert row["difference"] < 0.06
    assert row["regenerated"] >= 4  # near-ties


@pytest.mark.parametrize("name", ["llama4-wrapped", "mistral3-wrapped", "qwen3.5-wrapped", "kimi-k2.5"])
def test_a_wrapper_is_served_with_a_draft(found: dict[str, dict[str, Any]], name: str) -> None:
    row = found[name]
    assert row["rounds"] > 60
    assert row["decoded"] >= (6 if row["dtype"] == "float32" else 4)


def test_gemma_3_takes_no_draft_in_vllm_and_eyas_says_so(found: dict[str, dict[str, Any]]) -> None:
    assert (
        "cannot serve this kind of draft for Gemma3ForConditionalGeneration"
        in (found["gemma3-wrapped"]["refused"])
    )
