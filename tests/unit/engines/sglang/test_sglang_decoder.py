"""SGLang as a decoder: a server is started, asked, and stopped with everything that it started."""

import os
import time
from pathlib import Path

import psutil
import pytest

from eyas.drafters.eagle3 import sglang
from eyas.engines.base import Prompt, Sampling
from eyas.engines.sglang.decoder import SglangDecoder
from eyas.errors import EyasError
from eyas.types import TargetSpec
from tiny import make_spec

# A stand-in for the package, with the forms of 0.5.23: it starts a process of its own, as SGLang does.
LAUNCH_SERVER = """
import json, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

words = dict(zip(sys.argv[1:], sys.argv[2:]))
if words["--model-path"].endswith("broken"):
    sys.exit("no weights in there")
open(words["--model-path"] + "/words", "w").write(" ".join(sys.argv[1:]))
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(words["--model-path"] + "/worker", "w").write(str(worker.pid))

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"data": [{"id": "m", "owned_by": "sglang"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/generate":
            self.answer({"meta_info": {"output_top_logprobs": [[[-0.1, 7, None], [-2.5, 9, None]]]}})
            return
        ids = [5, 6, 7, 2]
        choice = {"finish_reason": "stop", "matched_stop": 2, "text": "", "token_ids": ids,
                  "prompt_token_ids": body["prompt"]}
        reply = {"choices": [choice]}
        if "--speculative-algorithm" in words and body.get("return_spec_tokens_details"):
            reply["sglext"] = {"spec_tokens_details": {"spec_verify_ct": 2, "spec_num_correct_drafts": 1,
                "spec_correct_drafts_histogram": [1, 1]}}
        self.answer(reply)

    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass

HTTPServer(("127.0.0.1", int(words["--port"])), Handler).serve_forever()
"""
SPEC = make_spec(eos_token_ids=(2,))


@pytest.fixture(autouse=True)
def _stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(LAUNCH_SERVER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))


def decoder_of(folder: Path, draft: Path | None, spec: TargetSpec = SPEC) -> SglangDecoder:
    folder.mkdir(exist_ok=True)
    return SglangDecoder(
        folder,
        spec,
        draft=draft,
        num_draft_tokens=3 if draft else 0,
        kind=sglang,
        max_length=64,
        max_concurrency=2,
    )


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_answers_and_rounds_are_read_from_replies_and_the_server_goes_with_all_its_processes(
    tmp_path: Path,
) -> None:
    decoder = decoder_of(tmp_path / "target", tmp_path / "draft")
    before = decoder.counters()
    served = decoder.answer([Prompt(f"p{i}", (3, 4, i)) for i in range(4)], 2, Sampling(16))
    counted = decoder.counters() - before
    assert {answer.token_ids for answer in served.answers.values()} == {(5, 6, 7, 2)}
    assert (counted.rounds, counted.accepted, counted.accepted_at) == (8, 4, (4,))
    assert decoder.next_token_logits([3, 4]) == {7: -0.1, 9: -2.5}
    words = (tmp_path / "target" / "words").read_text()
    assert "--speculative-algorithm EAGLE3" in words
    assert "--disable-radix-cache" in words
    worker = int((tmp_path / "target" / "worker").read_text())
    decoder.close()
    end = time.monotonic() + 10
    while is_running(worker) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(worker)


def test_the_target_alone_is_served_without_a_draft_and_counts_nothing(tmp_path: Path) -> None:
    decoder = decoder_of(tmp_path / "target", None)
    try:
        assert "--speculative" not in (tmp_path / "target" / "words").read_text()
        assert decoder.answer([Prompt("p", (3,))], 1, Sampling(16)).num_tokens == 4
        assert decoder.counters().rounds == 0
    finally:
        decoder.close()


def test_a_server_that_does_not_start_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"SGLang did not start \(exit code 1\)\nno weights in there"):
        decoder_of(tmp_path / "broken", None)
