"""eyas extract --endpoint, against the real server that eyas serve-capture --print describes."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from eyas.store.journal import read_journal
from eyas.store.shards import ShardStore
from machine import free_port, wait_until
from pipeline import eyas
from vllm_cases import (
    VOCAB_SIZE,
    make_model,
    reference_states,
    sample_of,
    spec_of_model,
    worst_difference,
    write_tokenizer,
)

pytest.importorskip("vllm", reason="vllm is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")

AUX = (2, 3)  # of 4 layers


class Server:
    """The server as a shell starts it from what the command printed."""

    def __init__(self, folder: Path) -> None:
        self.target = make_model(folder / "llama")
        write_tokenizer(self.target)
        self.staging = folder / "shared"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/v1"
        screen = eyas(
            "serve-capture", "--print", "--model-path", self.target, "--layer-ids", "2", "3",
            "--max-seq-len", "256", "--batch-size", "8", "--port", str(port),
            f"vllm.staging_dir={self.staging}",
        )  # fmt: skip
        assert screen.code == 0, screen.err
        assert f"eyas extract ... --endpoint {self.url}" in screen.err
        command = f"exec env {screen.out}".replace(" python ", f" {shlex.quote(sys.executable)} ")
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", command],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def wait(self) -> None:
        wait_until(self._answers, every_s=0.2)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/models").is_success
        return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def files(self) -> list[Path]:
        return [p for p in self.staging.rglob("*") if p.is_file()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    try:
        made.wait()
        yield made
    finally:
        made.kill()


def write_samples(path: Path, num: int) -> Path:
    rng = np.random.default_rng(0)
    with path.open("w") as f:
        for i in range(num):
            ids = rng.integers(3, VOCAB_SIZE, int(rng.integers(2, 250))).tolist()
            f.write(json.dumps({"id": f"row-{i}", "input_ids": ids}) + "\n")
    return path


def extract(server: Server, out: Path, data: Path, *further: Any) -> Any:
    return eyas(
        "extract", "--model-path", server.target, "--prepared-data", data, "--output-dir", out,
        "--max-seq-len", "256", "--batch-size", "8", "--layer-ids", "2,3", "--endpoint", server.url,
        "extract.shard_bytes=200000", *further,
    )  # fmt: skip


def test_states_through_a_server_equal_transformers_and_nothing_stays_behind(
    server: Server, tmp_path: Path
) -> None:
    screen = extract(server, tmp_path / "run", write_samples(tmp_path / "samples.jsonl", 40))
    assert screen.code == 0, screen.err
    assert "the engine passed the probe" in screen.err
    assert "not compared with the transformers engine" not in screen.err
    spec, num_seen = spec_of_model(server.target, AUX), 0
    for split in ("train", "held_out"):
        store = ShardStore(tmp_path / "run" / "states" / split)
        for index in range(len(store.lengths)):
            item = store.read(index)
            sample = item.sample
            (known,) = reference_states(server.target, spec, [sample_of("s", sample.input_ids)]).values()
            last = known[torch.from_numpy(sample.supervised), -1:]
            assert worst_difference({"aux": item.aux}, {"aux": known[:, :-1]}) < 1e-5
            assert worst_difference({"last": item.last[:, None]}, {"last": last}) < 1e-5
            num_seen += 1
    assert num_seen == 40
    assert server.files == []
    again = extract(server, tmp_path / "run", tmp_path / "samples.jsonl")
    assert (again.code, again.err.splitlines()[-1]) == (
        0,
        f"extract: already done ({tmp_path / 'run' / 'states'})",
    )


def test_answers_that_the_server_gives_besides_leave_no_files(server: Server) -> None:
    for further in ({}, {"vllm_xargs": {"eyas_file": "../elsewhere"}}):
        body = {"model": str(server.target), "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        reply = httpx.post(f"{server.url}/completions", json=body | further, timeout=300)
        assert reply.is_success
        assert reply.json()["usage"]["completion_tokens"] == 4
        assert reply.json()["kv_transfer_params"] is None
    assert server.files == []
    assert not (server.staging / "elsewhere").exists()


def test_what_does_not_fit_the_server_is_refused_before_work(server: Server, tmp_path: Path) -> None:
    data = write_samples(tmp_path / "samples.jsonl", 4)
    other = make_model(tmp_path / "other", hidden_size=64)
    write_tokenizer(other)
    (tmp_path / "elsewhere").mkdir()
    for arguments, what in (
        (["--layer-ids", "1,3"], "captures layers [2, 3, 4], this run needs [1, 3, 4]"),
        (["--model-path", other], "runs another model: its hidden_size is 128, the target's 64"),
        (["extract.engine=transformers"], "extract.endpoint is a vLLM server's, but extract.engine is"),
    ):
        screen = extract(server, tmp_path / "run", data, *arguments)
        assert screen.code == 2, screen.err
        what_line, hint_line = screen.err.splitlines()[-2:]
        assert what in what_line
        assert hint_line.startswith("hint: ")
        assert not (tmp_path / "run" / "states").exists()
    assert server.files == []


def test_a_server_that_dies_ends_the_run_and_complete_shards_are_kept(server: Server, tmp_path: Path) -> None:
    data = write_samples(tmp_path / "samples.jsonl", 2000)
    command = [
        sys.executable, "-m", "eyas", "extract", "--model-path", server.target, "--prepared-data", data,
        "--output-dir", tmp_path / "run", "--max-seq-len", "256", "--batch-size", "8", "--layer-ids", "2,3",
        "--endpoint", server.url, "extract.shard_bytes=200000",
    ]  # fmt: skip
    process = subprocess.Popen(
        [str(word) for word in command], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until(
            lambda: (
                process.poll() is not None or len(read_journal(tmp_path / "run" / "states" / "train")) >= 2
            )
        )
        assert process.poll() is None
        server.kill()
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 1
    what, hint = err.splitlines()[-2:]
    assert what.startswith(f"error: the server at {server.url} failed: ")
    assert hint == "hint: complete shards are kept: mend or restart it and run the same command again"
    assert len(read_journal(tmp_path / "run" / "states" / "train")) >= 2
