"""benchmarks/serving.py runs on a CPU with a small shape, in the real vLLM."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serving.py"


@pytest.mark.xdist_group("vllm")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_a_line_a_point_and_a_model_that_predicts_them() -> None:
    options = (
        "--shape tiny --concurrency 1,2 --num-draft-tokens 2 --prompt-tokens 8 --max-tokens 24 --rounds 2"
    )
    command = [sys.executable, str(SCRIPT), *options.split(), "--dtype", "float32", "--in-process"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    *points, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(p["num_draft_tokens"], p["concurrency"]) for p in points] == [(0, 1), (0, 2), (2, 1), (2, 2)]
    assert all(p["tokens_per_s"] > 0 and p["latency_s"] >= p["first_token_s"] > 0 for p in points)
    for p in points:
        low, high = p["tokens_per_s_range"]
        assert low <= p["tokens_per_s"] <= high
    # A random draft is almost never right.
    assert all(1 <= p["acceptance_length"] < 1.5 for p in points)
    for alone, drafted in zip(points[:2], points[2:], strict=True):
        ratio = drafted["tokens_per_s"] / alone["tokens_per_s"]
        assert drafted["speed_up"] == pytest.approx(ratio, rel=0.01)
    assert len(last["model"]["points"]) == 4
