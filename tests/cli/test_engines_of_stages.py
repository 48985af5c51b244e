"""Each verb asks only for the engine that it needs itself; eyas run asks for all."""

from pathlib import Path

import pytest

from eyas.engines.vllm import versions
from pipeline import eyas, write_run

MISSING = "error: the engine vllm is not installed"


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "is_installed", lambda: False)


@pytest.mark.parametrize("section", ["regenerate", "extract", "evaluate"])
def test_prepare_works_without_the_engine_of_a_later_stage(
    section: str, tmp_path: Path, tiny_target: Path
) -> None:
    run_file = write_run(tmp_path, tiny_target, **{section: {"engine": "vllm"}})
    screen = eyas("prepare", "-c", run_file)
    assert screen.code == 0, screen.err
    refused = eyas(section, "-c", run_file)
    assert refused.code == 2
    assert MISSING in refused.err


@pytest.mark.parametrize("section", ["regenerate", "extract", "evaluate"])
def test_run_is_refused_before_anything_is_written(section: str, tmp_path: Path, tiny_target: Path) -> None:
    run_file = write_run(tmp_path, tiny_target, **{section: {"engine": "vllm"}})
    screen = eyas("run", "-c", run_file)
    assert (screen.code, screen.err.splitlines()[-2]) == (2, MISSING)
    assert not (tmp_path / "run").exists()


def test_a_stage_that_is_done_needs_its_engine_no_more(tmp_path: Path, tiny_target: Path) -> None:
    run_file = write_run(tmp_path, tiny_target)
    assert eyas("prepare", "-c", run_file).code == 0
    assert eyas("regenerate", "-c", run_file).code == 0
    screen = eyas("regenerate", "-c", run_file, "extract.engine=vllm")
    assert screen.code == 0, screen.err


@pytest.mark.parametrize("setting", ["evaluate.temperatures=[0.7]", "evaluate.concurrency=[2]"])
def test_what_only_evaluate_reads_is_refused_by_run_and_evaluate_alone(
    setting: str, tmp_path: Path, tiny_target: Path
) -> None:
    run_file = write_run(tmp_path, tiny_target)
    assert eyas("prepare", "-c", run_file, setting).code == 0
    for verb in ("run", "evaluate"):
        screen = eyas(verb, "-c", run_file, setting)
        assert screen.code == 2
        assert "is measured in an engine that serves, and none is named" in screen.err
