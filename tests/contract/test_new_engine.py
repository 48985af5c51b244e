"""A new engine is a folder and a line of the registry: nothing else of eyas names it."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

import toy_engine.info
from eyas import registry
from eyas.store.shards import ShardStore
from pipeline import eyas, write_run
from tiny import spec_of
from toy_engine.engine import ToyEngine

FOLDER = Path(toy_engine.info.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENGINES, "toy", "toy_engine.info:INFO")


@pytest.fixture
def run_file(tmp_path: Path, tiny_target: Path) -> Path:
    return write_run(tmp_path, tiny_target, extract={"engine": "toy"})


def test_it_captures_for_extract_and_passes_the_probe(
    run_file: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[ToyEngine] = []
    capture = ToyEngine.capture
    monkeypatch.setattr(ToyEngine, "capture", lambda self, s: captured.append(self) or capture(self, s))
    for stage in ("prepare", "regenerate", "extract"):
        screen = eyas(stage, "-c", run_file)
        assert screen.code == 0, screen.err
    assert "extract: toy started" in screen.err
    assert captured
    store = ShardStore(run_file.parent / "run" / "states" / "train")
    assert store.spec.fingerprint == spec_of(tiny_target).fingerprint
    assert len(store.lengths)


def test_plan_asks_it_for_the_memory_that_it_needs(run_file: Path) -> None:
    screen = eyas("plan", "-c", run_file, "--tokens", "1000", "--no-calibrate", "--gpu-memory", "1", "--json")
    assert screen.code == 0, screen.err
    found = json.loads(screen.out)
    engine = found["memory"][0]
    assert (engine["what"], engine["basis"]) == ("extract, a GPU", "three copies of the weights")
    assert engine["bytes"] == 3 * found["target"]["weight_bytes"]
    assert engine["available"] == 2**30 // 2


def test_doctor_says_what_is_missing_and_a_run_is_refused(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "problem" not in eyas("doctor", "-c", run_file).out.replace("0 problems", "")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(toy_engine.info, "PACKAGE", "nowhere_installed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: find_spec(name, *_))
    found = json.loads(eyas("doctor", "-c", run_file, "--json").out)
    (finding,) = (f for f in found if f["subject"] == "toy")
    assert (finding["state"], finding["remedy"]) == ("problem", "pip install toy")
    screen = eyas("run", "-c", run_file)
    assert screen.err.splitlines()[-2:] == ["error: the engine toy is not installed", "hint: pip install toy"]
    assert not (run_file.parent / "run").exists()


def test_it_is_refused_for_what_it_cannot_do(run_file: Path) -> None:
    for settings, what in (
        ("regenerate.engine=toy", "regenerate.engine=toy: Toy generates no answers"),
        ("evaluate.engine=toy", "evaluate.engine=toy: Toy does not decode with a draft here"),
        ("extract.endpoint=http://127.0.0.1:9/v1", "extract.endpoint is a vLLM server's, but extract.engine"),
    ):
        screen = eyas("prepare", "-c", run_file, settings)
        assert screen.code == 2
        assert f"error: {what}" in screen.err


def test_its_files_are_those_that_the_page_lists() -> None:
    page = PAGE.read_text()
    section = page[page.index("## An engine") :]
    needed = re.findall(r"^\| `(\w+\.py)` \| needed", section, re.MULTILINE)
    assert sorted(needed) == sorted(path.name for path in FOLDER.glob("*.py"))
