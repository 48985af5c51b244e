"""vLLM's server as people run it: the target's generation_config.json sets penalties, a LoRA is loaded.

One server does for all: what eyas serve starts, with vLLM's own default of ``--generation-config`` again.
"""

import contextlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from eyas.data.prepared import read_samples
from machine import free_port, wait_until
from pipeline import Screen, change_json, exported_run, eyas, write_prompts
from tiny import CHAT_TEMPLATE, make_target

pytest.importorskip("vllm", reason="vllm is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("vllm")]

Samples = dict[str, tuple[tuple[int, ...], int]]
PENALTIES = {"repetition_penalty": 1.1, "top_k": 20, "top_p": 0.8, "do_sample": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    folder = Path(shutil.copytree(tiny_target, tmp_path_factory.mktemp("stock") / "target"))
    change_json(folder / "generation_config.json", **PENALTIES)
    return folder


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """A run that is done but for its evaluation; the target answered in this process."""
    root = tmp_path_factory.mktemp("run")
    sources = [str(write_prompts(root / "32.jsonl", 32))]
    return exported_run(root, target, data={"sources": sources})


@pytest.fixture(scope="module")
def server(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, adapter = free_port(), write_adapter(tmp_path_factory.mktemp("adapter"))
    words = ["-k", "2", "--port", str(port), "--max-model-len", "128", "--enforce-eager"]
    words += ["--kv-cache-memory-bytes", str(1 << 26), "--max-num-seqs", "8", "--generation-config", "auto"]
    words += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"tuned={adapter}"]
    command = [sys.executable, "-m", "eyas", "serve", str(run_file.parent / "run" / "draft"), *words]
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    log = (run_file.parent / "server.log").open("w")
    process = subprocess.Popen(
        command, env=os.environ | quiet, stdout=log, stderr=log, start_new_session=True
    )

    def answers() -> bool:
        assert process.poll() is None, Path(log.name).read_text()[-3000:]
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/health").is_success
        return False

    try:
        wait_until(answers, every_s=0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(300)
        log.close()


def write_adapter(folder: Path) -> Path:
    """Write a LoRA for the query projections of the tiny target."""
    names = [f"base_model.model.model.layers.{i}.self_attn.q_proj" for i in range(6)]
    pairs = {"lora_A": torch.randn(8, 32), "lora_B": torch.randn(128, 8)}
    save_file(
        {f"{name}.{key}.weight": value.clone() for name in names for key, value in pairs.items()},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
        )
    )
    return folder


class PenalizingProxy:
    """Adds a penalty to every request, as gateways do, and hands it on."""

    def __init__(self, url: str) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(httpx.get(url.removesuffix("/v1") + self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                body |= {"repetition_penalty": 1.3}
                self._reply(httpx.post(url.removesuffix("/v1") + self.path, json=body, timeout=300))

            def _reply(self, reply: httpx.Response) -> None:
                self.send_response(reply.status_code)
                self.send_header("Content-Length", str(len(reply.content)))
                self.end_headers()
                self.wfile.write(reply.content)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> "PenalizingProxy":
        threading.Thread(target=self._server.serve_forever).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def regenerate(folder: Path, run_file: Path, *settings: str) -> tuple[Screen, Samples]:
    """Answer the run's prompts again, in a run folder of their own."""
    words = ("-c", run_file, f"run_dir={folder}", *settings)
    screen = eyas("prepare", *words)
    assert screen.code == 0, screen.err
    screen = eyas("regenerate", *words)
    return screen, samples_of(folder / "regenerated") if screen.code == 0 else {}


def samples_of(folder: Path) -> Samples:
    """Return each sample's ids, and where its first answer begins."""
    return {
        sample.sample_id: (tuple(sample.input_ids.tolist()), int(sample.loss_mask.argmax()))
        for split in ("train", "held_out")
        for sample in read_samples(folder, split)
    }


def test_a_stock_servers_answers_are_the_targets_own(server: str, run_file: Path, tmp_path: Path) -> None:
    screen, found = regenerate(tmp_path / "run", run_file, f"regenerate.endpoint={server}")
    assert screen.code == 0, screen.err
    assert "cannot" not in screen.err
    assert "offers no rendering" not in screen.err
    known = samples_of(run_file.parent / "run" / "regenerated")
    assert len(known) >= 32
    assert found == known
    # Its own values would have changed some: they are what a request without such fields gets.
    model = httpx.get(f"{server}/models").json()["data"][0]["id"]
    prompts = [ids[:start] for ids, start in known.values()]
    body = {"model": model, "prompt": prompts, "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    choices = httpx.post(f"{server}/completions", json=body, timeout=300).json()["choices"]
    penalized = [tuple(choice["token_ids"]) for choice in choices]
    pairs = zip(penalized, known.values(), strict=True)
    assert any(answer != ids[start : start + len(answer)] for answer, (ids, start) in pairs)


def test_a_stock_server_is_measured_over_http(server: str, run_file: Path) -> None:
    screen = eyas("evaluate", "-c", run_file, "--endpoint", server, "--fresh")
    assert screen.code == 0, screen.err
    report = json.loads((run_file.parent / "run" / "evaluation" / "report.json").read_text())
    served = report["served"]
    assert served["agreement"]["broken"] == []
    low, high = served["agreement"]["served"]
    assert low <= report["acceptance"] <= high
    assert served["lossless"]["differences"] == []
    assert len(served["points"][0]["acceptance_rates"]) == 2
    assert "no recommendation" in served["recommendation"]
    screen = eyas("evaluate", "-c", run_file, "--endpoint", server, "--fresh", "evaluate.num_draft_tokens=3")
    assert screen.code == 2
    assert "error: the server drafts 2 tokens a round, evaluate.num_draft_tokens is 3" in screen.err


def test_a_penalty_that_cannot_be_switched_off_is_refused(
    server: str, run_file: Path, tmp_path: Path
) -> None:
    with PenalizingProxy(server) as proxy:
        screen, _ = regenerate(tmp_path / "run", run_file, f"regenerate.endpoint={proxy.url}")
        evaluated = eyas("evaluate", "-c", run_file, "--endpoint", proxy.url, "--fresh")
    for refused in (screen, evaluated):
        assert refused.code == 1
        what, hint = refused.err.splitlines()[-2:]
        assert what.startswith("error: the server's greedy answers are not its own model's likeliest tokens")
        assert "penalty" in hint
    assert not (tmp_path / "run" / "regenerated" / "answers.jsonl").read_text()


@pytest.mark.parametrize(
    ("difference", "what"),
    [
        ("template", "error: the server renders a prompt to "),
        ("model", " greedy tokens of the server are not the target's: it serves another model"),
        ("adapter", "error: the server's tuned is an adapter (LoRA) of "),
    ],
)
def test_what_is_not_the_target_is_refused(
    server: str, run_file: Path, target: Path, tmp_path: Path, difference: str, what: str
) -> None:
    settings = [f"regenerate.endpoint={server}"]
    if difference == "template":
        other = Path(shutil.copytree(target, tmp_path / "other"))
        (other / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("'\n'", "' '", 1))
        settings.append(f"target.model={other}")
    elif difference == "model":
        settings.append(f"target.model={make_target(tmp_path / 'other', seed=1)}")
    else:
        settings.append("regenerate.extra_body={model: tuned}")
    screen, _ = regenerate(tmp_path / "run", run_file, *settings)
    assert screen.code in (1, 2)
    assert what in screen.err.splitlines()[-2]
