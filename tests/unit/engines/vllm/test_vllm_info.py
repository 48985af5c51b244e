"""vLLM's facts follow from its section of the run file and from its version; vLLM is not imported."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eyas.config.load import load_config
from eyas.config.schema import RunConfig
from eyas.engines.info import DraftServer, engine_info
from eyas.engines.vllm import engine_args, versions
from eyas.errors import UserError
from tiny import make_spec

INFO = engine_info("vllm")


def config_of(*settings: str) -> RunConfig:
    return load_config(None, ("run_dir=r", "target.model=m", "data.sources=[a]", *settings)).config


def installed(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.setattr(versions, "is_installed", lambda: text is not None)
    for module in (versions, engine_args):
        monkeypatch.setattr(module, "is_cpu_build", lambda: False)
    monkeypatch.setattr(versions, "version_text", lambda: text)


def test_gpus_share_and_memory_are_those_of_its_section() -> None:
    config = config_of(
        "vllm.tensor_parallel_size=4", "vllm.gpu_memory_utilization=0.7", "data.max_length=100"
    )
    assert (INFO.gpus(config), INFO.memory_share(config)) == (4, 0.7)
    target: Any = SimpleNamespace(
        spec=make_spec(), weight_bytes=4000, kv_bytes_per_token=80, latent_cache=False
    )
    states = target.spec.bytes_per_token
    assert INFO.memory(config, target)[0] == 1000 + 100 * (states + 20)
    target.latent_cache = True
    assert INFO.memory(config, target)[0] == 1000 + 100 * (states + 80)


def test_in_an_actor_its_ranks_are_processes_unless_told_otherwise() -> None:
    assert INFO.in_actor(config_of()).vllm.engine_args == ("distributed_executor_backend=mp",)
    told = config_of("vllm.engine_args=[distributed_executor_backend=uni]")
    assert INFO.in_actor(told) is told


@pytest.mark.parametrize(
    ("text", "state", "says"),
    [
        (None, "ok", "needed for large targets only"),
        ("0.15.0", "warning", "too old"),
        ("0.20.1", "warning", "does not serve drafts"),
        ("0.30.0", "warning", "works; newer is dependable"),
        ("0.32.0", "ok", "0.32"),
    ],
)
def test_doctor_says_what_a_version_is_good_for(
    text: str | None, state: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, text)
    (found,) = INFO.findings(None, wanted=False)
    assert (found.state, says in found.text) == (state, True)
    (wanted,) = INFO.findings(None, wanted=True)
    assert wanted.state == {None: "problem", "0.15.0": "problem"}.get(text, state)


def test_states_that_do_not_fit_into_shared_memory_are_warned_of() -> None:
    config = config_of("extract.engine=vllm", f"vllm.staging_bytes={1 << 50}")
    assert [f.subject for f in INFO.findings(config, wanted=True)][-1] == "staging"
    elsewhere = config_of("extract.engine=vllm", f"vllm.staging_bytes={1 << 50}", "vllm.staging_dir=/big")
    for other in (elsewhere, config_of(f"vllm.staging_bytes={1 << 50}")):
        assert "staging" not in [f.subject for f in INFO.findings(other, wanted=True)]


def test_the_trouble_of_a_missing_engine_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    found = INFO.installed()
    assert found.version is None
    assert found.trouble == "the engine vllm is not installed"
    assert "pip install" in str(found.hint)
    installed(monkeypatch, "0.32.0+cpu")
    assert INFO.installed().version == "0.32.0+cpu"


def test_the_command_of_a_cpu_build_starts_its_module_and_reserves_no_gpu(tmp_path: Path) -> None:
    server = DraftServer(
        draft=tmp_path, kind="eagle3", target="/models/t", num_draft_tokens=2, dtype="float32",
        host="127.0.0.1", port=8000, tp_size=1, gpu_memory_utilization=0.9,
    )  # fmt: skip
    words = INFO.serve_command(server, on_cpu=True)
    assert words[:5] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/t"]
    assert "--gpu-memory-utilization" not in words
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 2}
    assert INFO.serve_command(server, on_cpu=False)[:3] == ["vllm", "serve", "/models/t"]


def test_a_capture_server_elsewhere_needs_no_vllm_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, None)
    config = config_of(f"vllm.staging_dir={tmp_path}")
    server = INFO.capture_server(config, Path("/models/t"), make_spec(), "h", 8000, here=False)
    assert server.words[:3] == ["vllm", "serve", "/models/t"]
    assert "eyas-serve-" in server.text
    with pytest.raises(UserError, match="not installed"):
        INFO.capture_server(config, Path("/models/t"), make_spec(), "h", 8000, here=True)
