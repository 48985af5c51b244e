"""What doctor finds on a machine: engines, servers."""

import importlib.util
import socket
from pathlib import Path

import pytest

from eyas.config.load import load_config
from eyas.config.schema import RunConfig
from eyas.findings import Finding
from eyas.plan.machine import LOWEST, machine_findings
from pipeline import write_run
from version_bounds import floors


@pytest.fixture
def config(tmp_path: Path, tiny_target: Path) -> RunConfig:
    return load_config(write_run(tmp_path, tiny_target)).config


def finding(config: RunConfig | None, subject: str) -> Finding:
    (found,) = (f for f in machine_findings(config) if f.subject == subject)
    return found


def test_a_missing_engine_matters_to_those_who_want_it(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert finding(None, "vllm").state == finding(config, "vllm").state == "ok"
    for stage in ("extract", "regenerate", "evaluate"):
        section = getattr(config, stage).model_copy(update={"engine": "vllm"})
        wanting = config.model_copy(update={stage: section})
        found = finding(wanting, "vllm")
        assert (found.state, found.remedy) == (
            "problem",
            "pip install 'eyas[vllm]', or set extract.engine=transformers",
        )
        at_a_server = {stage: section.model_copy(update={"endpoint": "http://127.0.0.1:9/v1"})}
        assert finding(config.model_copy(update=at_a_server), "vllm").state == "ok"


def test_an_engine_whose_command_is_printed_only_is_never_a_problem(config: RunConfig) -> None:
    assert finding(config, "sglang").state == "ok"


def test_an_unknown_engine_leaves_the_machine_to_be_looked_at(config: RunConfig) -> None:
    unknown = config.extract.model_copy(update={"engine": "vlm"})
    assert finding(config.model_copy(update={"extract": unknown}), "vllm").state != "problem"


def test_an_endpoint_that_listens_is_ok(config: RunConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        asking = config.regenerate.model_copy(update={"endpoint": url})
        assert finding(config.model_copy(update={"regenerate": asking}), "endpoint").state == "ok"


def test_the_lowest_versions_of_doctor_are_those_of_the_package_and_have_muon() -> None:
    lowest = floors()
    assert {name: lowest[name] for name in LOWEST} == LOWEST
    assert tuple(map(int, LOWEST["torch"].split("."))) >= (2, 9), "torch.optim.Muon is new in 2.9"
