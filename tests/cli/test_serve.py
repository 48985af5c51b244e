"""eyas serve refuses in one line, before anything is loaded, and prints the engines' commands."""

import itertools
import json
import os
import shlex
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from eyas.engines.info import Installed
from machine import free_port
from pipeline import Screen, change_json, eyas, write_run
from tiny import make_target


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """The draft folder of a finished run."""
    root = tmp_path_factory.mktemp("finished")
    run_file = write_run(root, tiny_target)
    for stage in ("prepare", "regenerate", "extract", "train", "export"):
        assert eyas(stage, "-c", run_file).code == 0
    return root / "run" / "draft"


@pytest.fixture
def draft(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "draft"))


def assert_refused(screen: Screen, what: str, hint: str) -> None:
    first, second = screen.err.splitlines()
    assert what in first
    assert hint in second
    assert screen.out == ""
    assert screen.code == 2


def test_the_printed_command_of_vllm(draft: Path, tiny_target: Path) -> None:
    further = ("--port", "8100", "--trust-remote-code", "--max-model-len", "512")
    screen = eyas("serve", draft, "--print", "-k", "2", *further)
    assert screen.code == 0, screen.err
    words = shlex.split(screen.out)
    assert words[:3] == ["vllm", "serve", str(tiny_target)]
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 2}
    assert words[words.index("--dtype") + 1] == "float32"
    assert words[words.index("--generation-config") + 1] == "vllm"
    assert "--trust-remote-code" in words
    assert words[-4:] == ["--port", "8100", "--max-model-len", "512"]


def test_the_revision_that_a_draft_was_trained_for_is_served(
    draft: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a hub id; a target that is named instead has other revisions."""
    asked: list[Any] = []

    def located(name: str, revision: str | None = None) -> tuple[Path, bool]:
        asked.append(revision)
        return tiny_target, True

    monkeypatch.setattr("eyas.serving.fit.locate_config", located)
    monkeypatch.setattr("eyas.serving.fit.is_local", lambda name: False)
    target = json.loads((draft / "config.json").read_text())["eyas"]["target"]
    change_json(draft / "config.json", eyas={"target": target | {"model": "a/b", "revision": "abc"}})
    screen = eyas("serve", draft, "--print")
    words = shlex.split(screen.out)
    assert words[words.index("--revision") + 1] == "abc"
    assert "--revision" not in eyas("serve", draft, "--print", "--target", "c/d").out
    assert asked == ["abc", None]


def test_the_printed_command_of_sglang(draft: Path, tiny_target: Path) -> None:
    screen = eyas("serve", draft, "--print", "--engine", "sglang", "-k", "4", "--tp-size", "2")
    assert screen.code == 0, screen.err
    words = shlex.split(screen.out)
    assert words[:5] == ["python", "-m", "sglang.launch_server", "--model-path", str(tiny_target)]
    given = dict(itertools.pairwise(words))
    assert given["--speculative-algorithm"] == "EAGLE3"
    assert given["--speculative-draft-model-path"] == str(draft)
    assert given["--speculative-num-steps"] == "4"
    assert given["--speculative-eagle-topk"] == "1"
    assert given["--speculative-num-draft-tokens"] == "5"
    assert given["--tp"] == "2"


def test_a_draft_of_another_target_of_the_same_shape(draft: Path, tmp_path: Path) -> None:
    other = make_target(tmp_path / "other", seed=1)
    screen = eyas("serve", draft, "--target", other)
    assert_refused(screen, "was trained for another target than", "serve it with its own target")


def test_a_draft_of_a_target_of_another_shape(draft: Path, tmp_path: Path) -> None:
    other = make_target(tmp_path / "other", hidden_size=64)
    what = f"300 ids and width 32; {other} has 300 and 64"
    assert_refused(eyas("serve", draft, "--target", other), what, "with --target")


def test_a_target_that_is_not_there(draft: Path, tmp_path: Path) -> None:
    screen = eyas("serve", draft, "--target", tmp_path / "nowhere")
    assert_refused(screen, "there is no model folder", "a local folder")


def test_a_folder_that_holds_no_draft(tmp_path: Path, tiny_target: Path) -> None:
    assert_refused(eyas("serve", tmp_path), "has no config.json", "eyas export")
    screen = eyas("serve", tiny_target)
    assert screen.code == 2
    assert "is no draft that eyas knows: its config.json names LlamaForCausalLM" in screen.err


def test_a_changed_byte_and_a_truncated_file(draft: Path) -> None:
    path = draft / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert_refused(eyas("serve", draft), "its checksum differs", "export again")
    path.write_bytes(whole[:-1000])
    assert_refused(eyas("serve", draft), "is damaged", "export, copy or download")


def test_a_config_that_is_cut_off(draft: Path) -> None:
    path = draft / "config.json"
    path.write_text(path.read_text()[:50])
    assert_refused(eyas("serve", draft), "config.json is damaged", "export, copy or download it again")


def test_an_engine_that_is_not_installed(draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.engines.vllm import versions

    monkeypatch.setattr(versions, "is_installed", lambda: False)
    assert_refused(eyas("serve", draft), "vllm is not installed", "pip install")


def test_a_draft_whose_heads_do_not_divide_among_the_ranks(
    draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyas.engines.vllm.info import VllmInfo

    monkeypatch.setattr(VllmInfo, "check_server", lambda *_: None)
    monkeypatch.setattr(VllmInfo, "installed", lambda self: Installed("0.32.0"))
    refused = eyas("serve", draft, "--tp-size", "3", "--port", free_port())
    assert_refused(refused, "do not divide among --tp-size=3 ranks", "a multiple of 3")


def test_sglang_is_served_where_it_is_installed_and_a_gpu_is_there(
    draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyas.engines.sglang.info import SglangInfo

    monkeypatch.setattr(
        SglangInfo, "installed", lambda self: Installed(None, "the engine sglang is not installed")
    )
    refused = eyas("serve", draft, "--engine", "sglang")
    assert_refused(refused, "the engine sglang is not installed", "add --print, and run the command where")
    monkeypatch.setattr(SglangInfo, "installed", lambda self: Installed("0.5.23"))
    refused = eyas("serve", draft, "--engine", "sglang")
    assert_refused(refused, "SGLang serves drafts on a GPU, and there is none here", "add --print")
    started: list[list[str]] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("eyas.stages.serve.check_memory", lambda *_: False)
    monkeypatch.setattr("os.execvp", lambda program, words: started.append(words))
    screen = eyas("serve", draft, "--engine", "sglang", "--port", str(free_port()))
    assert screen.code == 0, screen.err
    assert started[0][:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert "needs SGLang 0.5.12 or later" in screen.err
    monkeypatch.setattr(SglangInfo, "installed", lambda self: Installed("0.5.11"))
    refused = eyas("serve", draft, "--engine", "sglang", "--port", str(free_port()))
    assert_refused(refused, "SGLang 0.5.11 would serve this draft wrongly", "pip install 'sglang>=0.5.12'")
    assert len(started) == 1


@pytest.fixture
def supported(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Take the engine's support for granted, and keep what would be started."""
    from eyas.engines.vllm import versions

    started: list[Any] = []
    monkeypatch.setattr(versions, "check_draft_support", lambda spec, kind: None)
    monkeypatch.setattr(os, "execvp", lambda file, words: started.append((file, words)))
    return started


def test_a_port_in_use(draft: Path, supported: list[Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        screen = eyas("serve", draft, "--port", port)
    assert_refused(screen, f"127.0.0.1:{port} cannot be served on", f"--port {port + 1}")
    assert supported == []


def test_a_model_that_does_not_fit(
    draft: Path, supported: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert_refused(
        eyas("serve", draft, "--port", free_port()), "GiB on each device, this machine has", "--tp-size"
    )
    assert supported == []


def test_heads_that_do_not_divide_among_ranks(draft: Path, supported: list[Any]) -> None:
    assert_refused(eyas("serve", draft, "--tp-size", "3"), "do not divide among 3", "tensor_parallel_size")
    assert supported == []


def test_what_fits_is_started(draft: Path, tiny_target: Path, supported: list[Any]) -> None:
    screen = eyas("serve", draft, "--port", free_port())
    assert screen.code == 0, screen.err
    ((_, words),) = supported
    assert str(tiny_target) in words
    assert screen.err.startswith("serve: ")


def test_a_draft_from_elsewhere_needs_its_target_named(draft: Path, tiny_target: Path) -> None:
    change_json(draft / "config.json", eyas={})
    assert_refused(eyas("serve", draft, "--print"), "does not say which target", "--target")
    assert eyas("serve", draft, "--print", "--target", tiny_target).code == 0


def test_an_sglang_that_would_serve_the_draft_wrongly_is_refused(
    draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyas.engines.info import Installed
    from eyas.engines.sglang.info import SglangInfo

    monkeypatch.setattr(SglangInfo, "installed", lambda self: Installed("0.5.11"))
    screen = eyas("serve", draft, "--print", "--engine", "sglang")
    assert_refused(screen, "SGLang 0.5.11 would serve this draft wrongly", "pip install 'sglang>=0.5.12'")
    monkeypatch.setattr(SglangInfo, "installed", lambda self: Installed("0.5.12.post1"))
    screen = eyas("serve", draft, "--print", "--engine", "sglang")
    assert screen.code == 0
    assert "needs SGLang 0.5.12 or later" in screen.err
