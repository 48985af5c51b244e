"""A capturing server is held to this run before any work: one line and a remedy for each way to be wrong."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.engines.vllm import server_session as remote
from eyas.engines.vllm.engine import VllmEngine
from eyas.engines.vllm.state_transfer import (
    STAGING_FORMAT,
    StagedStates,
    layer_digests,
    write_digests,
    write_states,
)
from eyas.errors import EyasError, UserError
from eyas.types import Failure, HiddenStates, TargetSpec
from vllm_cases import make_model, mixed_samples, spec_of_model

AUX = (1, 2)
SHOWN = "the command that eyas serve-capture --print shows for this run"


class Server:
    """Answers as vLLM with our connector does, states are the ids; ``facts`` are what it says it is."""

    def __init__(self, folder: Path, spec: TargetSpec) -> None:
        self.folder, self.spec = folder, spec
        folder.mkdir()
        self.names: list[str] = []
        self.max_model_len = 257
        self.captures = self.writes = True
        self.status = 200
        self.facts: dict[str, Any] = {
            "vllm": "0.32.0",
            "staging": STAGING_FORMAT,
            "layer_ids": [1, 2, 4],
            "num_layers": 4,
            "hidden_size": spec.hidden_size,
            "dtype": spec.dtype,
            "num_ranks": 1,
            "prefix_caching": False,
            "target": spec.weights_fingerprint,
        }
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, {"data": [{"id": "tiny", "max_model_len": outer.max_model_len}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.answer(outer.status, outer.complete(body) if outer.status == 200 else {"error": "busy"})

            def answer(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body["vllm_xargs"]["eyas_file"]
        self.names.append(name)
        path, ids = self.folder / name, torch.tensor(body["prompt"])
        shape = (len(ids), len(self.facts["layer_ids"]), self.spec.hidden_size)
        states = ids[:, None, None].expand(shape).float().contiguous()
        if self.writes:
            if name.startswith("probe_output-"):
                write_digests(path, 0, layer_digests(states))
            write_states(path, StagedStates.split(states, ids, tuple(self.facts["layer_ids"])))
        logprobs = {"token_logprobs": [-1.5]} if body["logprobs"] else None
        choice = {"finish_reason": "length", "token_ids": [7], "logprobs": logprobs}
        params = {"hidden_states_path": str(path), "eyas": self.facts} if self.captures else None
        return {"choices": [choice], "kv_transfer_params": params}

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture
def server(tmp_path: Path, model: Path) -> Iterator[Server]:
    made = Server(tmp_path / "shared", spec_of_model(model, AUX))
    yield made
    made.close()


def engine_of(server: Server, model: Path, url: str | None = None, **settings: Any) -> VllmEngine:
    from eyas.config.schema import VllmSettings

    return VllmEngine(
        model, spec_of_model(model, AUX), settings=VllmSettings(**settings), endpoint=url or server.url
    )


def refused(server: Server, model: Path, what: str, hint: str, **settings: Any) -> None:
    engine = engine_of(server, model, **settings)
    with pytest.raises(UserError) as error:
        engine.probe_outputs([])
    engine.close()
    assert error.value.what == what.format(url=server.url)
    assert error.value.hint == hint


def test_states_come_back_with_the_samples_they_belong_to_and_no_file_stays(
    server: Server, model: Path
) -> None:
    engine = engine_of(server, model)
    samples = mixed_samples([1, 5, 30, 2, 200, 17])
    for item in engine.capture(samples):
        assert isinstance(item, HiddenStates)
        assert torch.equal(item.aux[:, 0, 0].long(), torch.from_numpy(item.sample.input_ids).long())
    (probe_output,) = engine.probe_outputs(samples[:1])
    assert not isinstance(probe_output, Failure)
    assert (probe_output.next_token, probe_output.next_logprob) == (7, -1.5)
    assert len(probe_output.rank_digests) == 1
    assert list(server.folder.iterdir()) == []
    engine.close()


def test_two_clients_of_one_server_do_not_use_the_same_names(server: Server, model: Path) -> None:
    for _ in range(2):
        engine = engine_of(server, model)
        list(engine.capture(mixed_samples([3, 4])))
        engine.close()
    assert len(set(server.names)) == len(server.names) == 6


def test_files_that_come_after_an_abort_and_what_killed_clients_left_are_removed(
    server: Server, model: Path
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = os.uname().nodename.partition(".")[0]
    left = server.folder / f"sample-{host}-{ended.pid}-abcdef-00000001"
    others = server.folder / "sample-elsewhere-1-abcdef-00000001"
    left.touch()
    others.touch()
    engine = engine_of(server, model)
    items = engine.capture(mixed_samples([9] * 40))
    next(items)
    items.close()
    assert len(list(engine.capture(mixed_samples([3])))) == 1
    engine.close()
    assert list(server.folder.iterdir()) == [others]


def test_an_address_where_nobody_answers(model: Path, server: Server) -> None:
    engine = engine_of(server, model, url="http://127.0.0.1:9/v1")
    with pytest.raises(UserError) as error:
        engine.probe_outputs([])
    assert error.value.what == (
        "extract.endpoint=http://127.0.0.1:9/v1 does not answer /models: "
        "ConnectError [Errno 111] Connection refused"
    )
    assert error.value.hint == f"start {SHOWN}; the address ends in /v1, e.g. http://127.0.0.1:8000/v1"


def test_a_server_without_the_connector(server: Server, model: Path) -> None:
    server.captures = False
    refused(
        server,
        model,
        "the server at {url} was not started for capture: it names no file of states",
        f"restart it with {SHOWN}",
    )


def test_a_server_of_another_model(server: Server, model: Path) -> None:
    server.facts["num_layers"] = 32
    refused(
        server,
        model,
        "the server at {url} runs another model: its num_layers is 32, the target's 4",
        f"restart it with {SHOWN}, or set target.model to the one it serves",
    )


def test_a_server_of_other_weights(server: Server, model: Path) -> None:
    server.facts["target"] = "other"
    refused(
        server,
        model,
        f"the server at {{url}} was started for other weights than those of {model}",
        f"restart it with {SHOWN}, or set target.model to the one it serves",
    )


def test_a_server_that_captures_other_layers(server: Server, model: Path) -> None:
    server.facts["layer_ids"] = [2, 3, 4]
    refused(
        server,
        model,
        "the server at {url} captures layers [2, 3, 4], this run needs [1, 2, 4]",
        f"restart it with {SHOWN}, or set target.aux_layer_ids=[2, 3]",
    )


def test_a_server_too_short_for_the_samples(server: Server, model: Path) -> None:
    server.max_model_len = 100
    refused(
        server,
        model,
        "the server at {url} takes 100 positions; samples of data.max_length=256 need 257",
        f"restart it with {SHOWN}, or set data.max_length=99",
    )


@pytest.mark.parametrize(
    ("facts", "trouble"),
    [
        ({"vllm": "0.21.0"}, "0.21.0, which has no dependable extract_hidden_states"),
        ({"vllm": "0.28.0", "prefix_caching": True}, "0.28.0, which loses the states of cached prefixes"),
    ],
)
def test_a_server_of_a_version_that_gives_wrong_states(
    server: Server, model: Path, facts: dict[str, Any], trouble: str
) -> None:
    server.facts |= facts
    refused(
        server,
        model,
        f"the server at {{url}} is vLLM {trouble}",
        f"restart it with {SHOWN}, under a newer vLLM",
    )


def test_a_server_that_another_eyas_started(server: Server, model: Path) -> None:
    server.facts |= {"staging": 1}
    refused(
        server,
        model,
        "the server at {url} was started by another version of eyas",
        f"restart it with {SHOWN}",
    )


def test_a_folder_that_is_not_shared(
    server: Server, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_FIRST_FILE_S", 0.1)
    hint = "set vllm.staging_dir to a folder that both see, for the server and for this command"
    refused(
        server,
        model,
        f"the server writes states to {tmp_path / 'nowhere'}, which is not there on this machine",
        hint,
        staging_dir=tmp_path / "nowhere",
    )
    server.writes = False
    name = "sample-"
    engine = engine_of(server, model)
    with pytest.raises(UserError) as error:
        engine.probe_outputs([])
    assert error.value.what.startswith(
        f"the server's first file of states did not come to {server.folder}: the worker wrote no {name}"
    )
    assert error.value.hint == hint


def test_a_server_that_fails_later_ends_the_run_with_its_reason(
    server: Server, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_PAUSE_S", 0.01)
    engine = engine_of(server, model)
    engine.probe_outputs([])
    server.status = 503
    with pytest.raises(EyasError) as error:
        list(engine.capture(mixed_samples([5])))
    assert error.value.what == f'the server at {server.url} failed: HTTP 503: {{"error": "busy"}}'
    assert error.value.hint.startswith("complete shards are kept")
    engine.close()
