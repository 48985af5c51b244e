"""What the extract stage does with an engine that does wrong: it never writes it down."""

import json
from pathlib import Path

import pytest

from eyas import registry
from eyas.store.journal import read_journal
from pipeline import Screen, eyas, write_run


@pytest.fixture(scope="module")
def prepared(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is ready for extraction, as a run file."""
    folder = tmp_path_factory.mktemp("prepared")
    run_file = write_run(folder, tiny_target, extract={"shard_bytes": 1 << 30})
    for stage in ("prepare", "regenerate"):
        assert eyas(stage, "-c", run_file).code == 0
    return run_file


@pytest.fixture
def extract_with(prepared: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def run(engine: str, *settings: str) -> Screen:
        monkeypatch.setitem(registry.ENGINES, "bad", f"bad_engines:{engine}Info")
        return eyas("extract", "-c", prepared, "--fresh", "extract.engine=bad", *settings)

    return run


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("Failing", "1 samples failed, more than extract.max_failures=0"),
        ("Losing", "lost 1 samples"),
        ("Doubling", "twice or unasked"),
        ("Renaming", "warm-up"),
        ("Echoing", "echoed other token ids"),
        ("NotFinite", "aux states are not finite"),
        ("ZeroLayer", "is all zero"),
        ("ZeroLast", "is all zero"),
        ("OneLayerOfThree", "1 aux layers of width 32, the target's are 3 of width 32"),
        ("Swapping", "last states do not predict the tokens that follow"),
        ("RepeatingALayer", "aux layers number 0 and 1 hold the same states"),
        ("DroppingARow", "of different tokens are the same"),
        ("LosingARow", "tokens but aux states"),
        ("ReturningAShard", "3 aux layers of width 16, the target's are 3 of width 32"),
        ("AddingWarmUpRows", "last states do not predict the tokens that follow"),
        ("NormingTheLast", "the last states are after the final norm"),
        ("ReturningAnAuxLayerAsLast", "the last states are those of layer 5"),
        ("LeavingRowsEmpty", "row 4 is all zero"),
        ("AlwaysNormed", "probe, teacher"),
        ("AlwaysShifted", "probe, teacher"),
        ("OffByOneLayer", "differ in this engine and in transformers"),
        ("WithAnotherRope", "differ in this engine and in transformers"),
    ],
)
def test_an_engine_that_does_wrong_is_refused_and_nothing_of_it_is_kept(
    prepared: Path,
    extract_with,
    engine: str,
    words: str,  # type: ignore[no-untyped-def]
) -> None:
    screen = extract_with(engine)
    assert screen.code == 1
    lines = screen.err.splitlines()
    assert [line for line in lines if line.startswith("error: ")], screen.err
    assert words in screen.err
    store = prepared.parent / "run" / "states" / "train"
    assert not list(store.glob("shard-*"))
    assert read_journal(store) == {}
    assert eyas("train", "-c", prepared).code == 2


def test_failures_that_are_allowed_are_counted_and_named(prepared: Path, extract_with) -> None:  # type: ignore[no-untyped-def]
    screen = extract_with("Failing", "extract.max_failures=2")
    assert screen.code == 0, screen.err
    states = prepared.parent / "run" / "states"
    assert json.loads((states / "stage.json").read_text())["num_failures"] == 2
    for split in ("train", "held_out"):
        ((_, reason),) = read_journal(states / split)[0].failures
        assert reason == "out of memory"
