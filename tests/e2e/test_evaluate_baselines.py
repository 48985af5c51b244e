"""What drafts without training, in the real vLLM, under the conditions of the draft."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline import exported_run, eyas

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.xdist_group("vllm"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


def test_baselines_and_arrivals_are_measured_with_the_draft(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyas.engines.vllm import decoder

    whole = decoder.VllmDecoder

    def start(*arguments: Any, **settings: Any) -> Any:
        # A process less, but numba's stays its own: vLLM's CPU build starts no draft next to it.
        alone = getattr(settings["kind"], "method", None) == "ngram"
        return whole(*arguments, **settings, in_process=not alone)

    monkeypatch.setattr(decoder, "VllmDecoder", start)
    run_file = exported_run(tmp_path, tiny_target)
    itself = f"draft_model:{tiny_target}"
    # vLLM's n-grams want numba, which not every environment has.
    ngram = ["ngram"] if importlib.util.find_spec("numba") else []
    words = [
        f"evaluate.baselines=[{','.join([*ngram, itself])}]",
        "evaluate.request_rates=[40]",
        "evaluate.concurrency=[2]",
        "evaluate.timed_rounds=2",
        "evaluate.engine=vllm",
    ]
    screen = eyas("evaluate", "-c", run_file, *words)
    assert screen.code == 0, screen.err
    folder = run_file.parent / "run" / "evaluation"
    served = json.loads((folder / "report.json").read_text())["served"]
    found = {(p["baseline"], p["num_draft_tokens"]): p for p in served["points"]}
    assert set(found) == {(None, 0), (None, 2), (itself, 2), *((name, 2) for name in ngram)}
    for p in found.values():
        low, high = p["tokens_per_s_range"]
        assert low <= p["tokens_per_s"] <= high
        assert 0 < p["inter_token_s"] <= p["inter_token_p99_s"]
        assert 0 < p["first_token_s"] <= p["first_token_p99_s"] <= p["latency_p95_s"] * 10
    # The target itself as the draft is always right, but at an answer's end.
    assert found[itself, 2]["acceptance_length"][1] > 2.5
    assert all(p["speed_up"] for key, p in found.items() if key[1])
    arrivals = {(p["baseline"], p["num_draft_tokens"]): p for p in served["arrivals"]}
    assert set(arrivals) == set(found)
    assert {p["num_requests"] for p in arrivals.values()} == {8}
    assert set(served["runners"]) == {"2", itself, "0", *ngram}
    assert "Without training, " in served["recommendation"]
    assert (folder / "arrivals.csv").is_file()
    page = (run_file.parent / "run" / "report.html").read_text()
    assert not ngram or "ngram, K = 2" in page
    assert f"draft_model {tiny_target.name}, K = 2" in page


def test_what_a_server_cannot_tell_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    run_file = exported_run(tmp_path, tiny_target)
    words = ["evaluate.endpoint=http://127.0.0.1:1/v1", "evaluate.baselines=[ngram]"]
    screen = eyas("evaluate", "-c", run_file, *words)
    assert screen.code == 2
    assert "evaluate.baselines is measured in an engine that eyas starts" in screen.err
