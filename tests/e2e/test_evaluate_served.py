"""The draft measured where it serves: vLLM's engine, a server like SGLang."""

import contextlib
import csv
import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from eyas.config.load import load_config
from eyas.config.schema import VllmSettings
from eyas.drafters.eagle3 import vllm
from eyas.engines.transformers.engine import TransformersEngine
from eyas.stages.run_context import RunContext
from machine import free_port
from metrics_server import SGLangServer
from pipeline import exported_run, eyas, write_prompts, write_run
from tiny import spec_of, write_jsonl

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("vllm")]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """A run that is done but for its evaluation."""
    return exported_run(tmp_path_factory.mktemp("run"), tiny_target)


def report_of(run_file: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((run_file.parent / "run" / "evaluation" / "report.json").read_text())
    return report


@needs_vllm
def test_vllm_agrees_with_prediction_and_decoding_here(
    tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyas.engines.vllm import decoder

    in_process = functools.partial(decoder.VllmDecoder, in_process=True)  # a process less
    started: list[int] = []

    def start(*arguments: Any, **settings: Any) -> Any:
        started.append(settings["num_draft_tokens"])
        if len(started) == 2:
            raise KeyboardInterrupt
        return in_process(*arguments, **settings)

    monkeypatch.setattr(decoder, "VllmDecoder", start)
    turns = [["the quick fox", "and then?"], ["a lazy dog"], ["users ask"]]
    rows = [{"suite": "s", "id": str(i), "category": "ab"[i % 2], "turns": t} for i, t in enumerate(turns)]
    bench = write_jsonl(tmp_path / "bench.jsonl", rows)
    words = ["run", "-c", run_file, "evaluate.engine=vllm", f"evaluate.benchmarks=[{bench}]"]
    screen = eyas(*words, "--fresh")
    assert screen.code == 130, screen.err
    screen = eyas(*words)
    assert screen.code == 0, screen.err
    assert "with K = 2 it was measured before" in screen.err
    assert started == [2, 0, 0]  # what was measured before the interruption was not measured again
    report = report_of(run_file)
    served = report["served"]

    assert served["agreement"]["broken"] == []
    low, high = served["agreement"]["served"]
    assert low <= report["acceptance"] <= high
    assert report["predicted"] == report["acceptance"] == served["agreement"]["reference"]
    assert served["agreement"]["compared"] == 4
    assert served["num_prompts"] == 4 + 4  # two of them turns of one dialogue
    lossless = served["lossless"]
    assert (lossless["compared"], lossless["identical_held_out"], lossless["differences"]) == (20, 4, [])
    assert lossless["rounding"]["parted"] == 0
    assert lossless["rounding"]["tokens"] > 20
    kinds = [(p["num_draft_tokens"], p["concurrency"]) for p in served["points"]]
    assert kinds == [(0, 1), (0, 4), (2, 1), (2, 4)]
    assert [p["speed_up"] is None for p in served["points"]] == [True, True, False, False]
    groups = {(c["suite"], c["category"]): c["num_prompts"] for c in served["categories"]}
    assert groups == {("held out", "all"): 4, ("s", "a"): 3, ("s", "b"): 1}

    folder = run_file.parent / "run" / "evaluation"
    assert not (folder / "so-far.json").exists()
    table = list(csv.DictReader((folder / "serving.csv").open()))
    assert [float(row["tokens_per_s"]) for row in table] == [p["tokens_per_s"] for p in served["points"]]
    assert {"acceptance_length_low", "acceptance_rate_1", "acceptance_rate_2"} <= set(table[0])
    assert len(list(csv.DictReader((folder / "categories.csv").open()))) == 3
    page = (run_file.parent / "run" / "report.html").read_text()
    assert "In the engine" in page
    assert "Speed-up over the target alone" in page
    assert served["recommendation"] in screen.err


def test_a_server_with_sglangs_counters_is_measured_without_decoding_here(run_file: Path) -> None:
    with SGLangServer(RunContext(load_config(run_file)), 2) as server:
        screen = eyas(
            "evaluate", "-c", run_file, "--endpoint", server.url, "--fresh", "evaluate.in_process=false"
        )
        settings = f"evaluate.endpoint={server.url}", "evaluate.in_process=false"
        summary = eyas("run", "-c", run_file, *settings)
    assert screen.code == 0, screen.err
    report = report_of(run_file)
    low, high = report["served"]["agreement"]["served"]
    assert low == report["acceptance"]
    assert low <= report["predicted"] <= high
    assert report["served"]["points"][0]["acceptance_rates"] is None
    assert report["plain_tokens_per_s"] is report["identical"] is None
    assert "not compared" in summary.out, summary.err
    assert eyas("compare", str(run_file.parent / "run"), str(run_file.parent / "run")).code == 0


def test_an_sglang_that_counts_in_its_replies_needs_no_metrics(run_file: Path) -> None:
    with SGLangServer(RunContext(load_config(run_file)), 2, in_replies=True) as server:
        screen = eyas(
            "evaluate", "-c", run_file, "--endpoint", server.url, "--fresh", "evaluate.in_process=false",
            "evaluate.num_draft_tokens=2",
        )  # fmt: skip
    assert screen.code == 0, screen.err
    served = report_of(run_file)["served"]
    low, high = served["agreement"]["served"]
    assert low <= report_of(run_file)["predicted"] <= high
    first, second = served["points"][0]["acceptance_rates"]
    assert 1 >= first >= second >= 0


@needs_vllm
def test_the_logits_that_judge_a_difference_are_the_targets_own(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyas.engines.vllm.decoder import VllmDecoder
    from eyas.engines.vllm.versions import RAW_LOGITS, installed_version

    # The engine's own process has it for as long as it lives; this one compiles kernels when it is asked.
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    spec, ids = spec_of(tiny_target), list(range(5, 45))
    decoder = VllmDecoder(
        tiny_target,
        spec,
        draft=None,
        num_draft_tokens=0,
        kind=vllm,
        settings=VllmSettings(),
        max_length=64,
        max_concurrency=2,
        in_process=True,
    )
    with contextlib.closing(decoder), contextlib.closing(TransformersEngine(tiny_target, spec)) as engine:
        found = decoder.next_token_logits(ids)
        logits, _ = engine.session().extend(ids)
    expected = dict(zip(*(column.tolist() for column in reversed(logits[-1].topk(20))), strict=True))
    tops = max(found.values()), max(expected.values())
    assert installed_version() < RAW_LOGITS or tops[0] == pytest.approx(tops[1], rel=1e-4)
    assert {t: tops[0] - found[t] for t in found} == pytest.approx(
        {t: tops[1] - expected[t] for t in expected}, abs=1e-3
    )


def test_a_prediction_from_answers_of_others_accuses_nobody(tmp_path: Path, tiny_target: Path) -> None:
    asked = [json.loads(line) for line in write_prompts(tmp_path / "prompts.jsonl").open()]
    rows = [
        {"id": row["id"], "messages": [{"role": "user", "content": row["prompt"]},
                                       {"role": "assistant", "content": "over the lazy dog"}]}
        for row in asked if "prompt" in row
    ]  # fmt: skip
    path = write_run(
        tmp_path,
        tiny_target,
        regenerate={"enabled": False},
        data={"sources": [str(write_jsonl(tmp_path / "talks.jsonl", rows))]},
        train={"num_epochs": 6, "learning_rate": 4e-3},
        evaluate={"num_prompts": 3, "max_new_tokens": 12, "concurrency": [1]},
    )
    for stage in ("prepare", "extract", "train", "export"):
        screen = eyas(stage, "-c", path)
        assert screen.code == 0, screen.err
    with SGLangServer(RunContext(load_config(path)), 2) as server:
        for in_process in (True, False):
            words = ["evaluate", "-c", path, "--endpoint", server.url, "--fresh"]
            screen = eyas(*words, f"evaluate.in_process={in_process}")
            assert screen.code == 0, screen.err
            report = report_of(path)
            assert report["served"]["agreement"]["compared"] == (3 if in_process else 0)
            said = "no answer decoded here is the stored one" if in_process else "answers that are stored"
            assert said in screen.err
            # or a comparison with it would have passed
            assert not report["acceptance"] / 1.03 <= report["predicted"] <= report["acceptance"] * 1.03


def test_a_server_that_answers_otherwise_than_the_target_is_found_out(run_file: Path) -> None:
    def spoil(ids: list[int]) -> list[int]:
        return [*ids[:2], (ids[2] + 1) % 250 + 3, *ids[3:]] if len(ids) > 3 else ids

    with SGLangServer(RunContext(load_config(run_file)), 2, spoil) as server:
        screen = eyas("evaluate", "-c", run_file, "--endpoint", server.url, "--fresh")
    assert screen.code == 1
    assert "error: the draft changed the answer to" in screen.err


def test_a_server_that_counts_nothing_is_refused_before_anything_is_measured(run_file: Path) -> None:
    with SGLangServer(RunContext(load_config(run_file)), 2) as server:
        server.metrics = lambda: "vllm:num_requests_running 0.0\n"  # type: ignore[method-assign]
        screen = eyas(
            "evaluate", "-c", run_file, "--endpoint", server.url, "--fresh", "evaluate.in_process=false"
        )
    assert screen.code == 2
    assert screen.err.splitlines()[-2] == "error: the server counts no speculative decoding"
    assert server.generated <= 8, "no more than the look at what it counts"


def test_a_server_that_is_not_there_is_named_with_its_setting(run_file: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    screen = eyas("evaluate", "-c", run_file, "--endpoint", url, "--fresh", "evaluate.in_process=false")
    assert screen.code == 2
    assert f"error: evaluate.endpoint={url} does not answer: Connection refused" in screen.err


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (["evaluate.in_process=false"], "evaluate.in_process is false and no engine is named"),
        (["evaluate.benchmarks=[gsm8k]"], "evaluate.benchmarks is measured in an engine that serves"),
        (["evaluate.sweep_draft_tokens=[5]"], "evaluate.sweep_draft_tokens is measured in an engine"),
    ],
)
def test_settings_that_nothing_would_read_are_refused(run_file: Path, settings: list[str], what: str) -> None:
    screen = eyas("evaluate", "-c", run_file, *settings)
    assert screen.code == 2
    assert what in screen.err
