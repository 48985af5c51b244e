"""Measurements are kept for the same engine, version, settings and machine only."""

import pytest

from eyas.config.load import load_config
from eyas.engines.vllm import versions
from eyas.serving.benchmark import conditions_of


def conditions(*settings: str) -> object:
    config = load_config(None, ("run_dir=r", "target.model=m", "data.sources=[a]", *settings)).config
    return conditions_of(config)


def test_engine_version_and_its_section_are_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "is_installed", lambda: True)
    monkeypatch.setattr(versions, "is_cpu_build", lambda: False)
    monkeypatch.setattr(versions, "version_text", lambda: "0.31.0")
    known = conditions("evaluate.engine=vllm")
    assert conditions("evaluate.engine=vllm") == known
    assert conditions("evaluate.engine=vllm", "vllm.tensor_parallel_size=2") != known
    assert conditions("evaluate.engine=vllm", "seed=1") != known
    monkeypatch.setattr(versions, "version_text", lambda: "0.32.0")
    assert conditions("evaluate.engine=vllm") != known


def test_an_engine_without_a_section_has_no_settings() -> None:
    assert conditions("vllm.tensor_parallel_size=2") == conditions()
