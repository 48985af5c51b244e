"""Stages of one command share an engine, and its owner ends it."""

from types import SimpleNamespace

import pytest

from eyas.config.load import load_config
from eyas.config.schema import RunConfig
from eyas.engines import checks
from eyas.engines.owner import EngineOwner


class Engine:
    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_two_stages_share_one_start_and_the_owner_ends_it() -> None:
    started: list[Engine] = []

    def start() -> Engine:
        started.append(Engine())
        return started[-1]

    owner = EngineOwner()
    owner.keep(True)
    for _stage in ("regenerate", "extract"):
        owner.lend(start).close()
    assert [engine.closed for engine in started] == [0]
    owner.keep(False)
    owner.close()
    assert [engine.closed for engine in started] == [1]
    assert not owner.keeps


def test_an_engine_whose_end_fails_is_not_ended_twice() -> None:
    def fail() -> None:
        raise OSError("it is gone")

    owner = EngineOwner()
    owner.keep(True)
    owner.lend(lambda: SimpleNamespace(close=fail))
    with pytest.raises(OSError, match="it is gone"):
        owner.close()
    owner.close()


def config_of(*words: str) -> RunConfig:
    engines = (
        "regenerate.engine=vllm",
        "extract.engine=vllm",
        "run_dir=run",
        "target.model=x",
        "data.sources=[]",
    )
    return load_config(None, (*engines, *words)).config


@pytest.mark.parametrize(
    "words",
    [
        ["regenerate.engine=transformers"],
        ["regenerate.enabled=false"],
        ["regenerate.endpoint=http://127.0.0.1:8000/v1"],
        ["extract.endpoint=http://127.0.0.1:8000/v1"],
        ["vllm.capture=native"],
        ["vllm.engine_args=[enable_prefix_caching=true]"],
    ],
    ids=lambda words: words[0],
)
def test_what_keeps_two_stages_from_one_start(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.engines.vllm import versions

    monkeypatch.setattr(versions, "is_installed", lambda: True)
    monkeypatch.setattr(versions, "is_cpu_build", lambda: True)
    assert checks.shares_start(config_of(), "extract")
    assert not checks.shares_start(config_of(), "evaluate")
    assert not checks.shares_start(config_of(*words), "extract")


def test_on_a_gpu_answers_are_not_given_in_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.engines.vllm import versions

    monkeypatch.setattr(versions, "is_installed", lambda: True)
    monkeypatch.setattr(versions, "is_cpu_build", lambda: False)
    assert not checks.shares_start(config_of(), "extract")
