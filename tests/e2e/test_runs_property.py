"""Whatever is done to a run, in any order: nothing finished is lost, and nothing that is shown is mixed."""

import json
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eyas.files import read_json
from eyas.run_folder import FOLDERS
from pipeline import eyas, write_run

# Which input of a stage names the output of which other: written down here once more, as the reference.
MADE_FROM = [
    ("regenerate", "prepared", "prepare"),
    ("extract", "samples", "regenerate"),
    ("train", "states", "extract"),
    ("export", "checkpoint", "train"),
    ("evaluate", "draft", "export"),
    ("evaluate", "states", "extract"),
]
OVERRIDES = [
    "train.num_epochs=2",
    "train.learning_rate=0.003",
    "seed=1",
    "regenerate.max_new_tokens=16",
    "extract.states_dtype=float8_e4m3fn",
    "evaluate.num_draft_tokens=3",
    "evaluate.num_prompts=2",
    "data.validation_fraction=0.3",
]


class Killed(BaseException):
    """The process ends here, as kill -9 would end it."""


@contextmanager
def killed_at(rename: int) -> Iterator[None]:
    """End the process before a rename: every change of a run folder is one."""
    replace, left = Path.replace, [rename]

    def counted(path: Path, to: Any) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return replace(path, to)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", counted)
        yield


def record(folder: Path) -> dict[str, Any] | None:
    path = folder / "stage.json"
    return read_json(path) if path.is_file() else None


def finished(run: Path) -> dict[str, dict[str, Any]]:
    """Return the finished outputs, wherever a killed process left them; evaluations by their settings."""
    found: dict[str, dict[str, Any]] = {}
    for stage, name in FOLDERS.items():
        places = [run / name] if stage != "evaluate" else [run / name, *(run / "evaluations").glob("*")]
        for place in [*places, run / f"{name}.redo"]:
            if (one := record(place)) is not None and one["done"]:
                key = stage if stage != "evaluate" else f"evaluate {json.dumps(one['inputs']['evaluate'])}"
                found.setdefault(key, one)
    return found


def check_shown(run: Path) -> None:
    """Every number that is shown belongs to one chain of outputs, or is said to be stale."""
    # A process killed between two renames leaves the new output next to where it belongs.
    records = {
        stage: record(run / name if (run / name).exists() else run / f"{name}.redo")
        for stage, name in FOLDERS.items()
    }

    def is_consistent(stage: str) -> bool:
        one = records[stage]
        if one is None or not one["done"]:
            return False
        links = [(name, source) for made, name, source in MADE_FROM if made == stage]
        return all(
            (source := records[s]) is not None
            and source["output"] == one["inputs"][name]
            and is_consistent(s)
            for name, s in links
        )

    screen = eyas("compare", run, "--json")
    assert screen.code == 0, screen.err
    figures = json.loads(screen.out)["figures"]
    evaluated, trained = records["evaluate"], records["train"]
    if "acceptance length, decoded" in figures:
        assert evaluated is not None
        assert is_consistent("evaluate")
        assert figures["acceptance length, decoded"] == [f"{evaluated['report']['acceptance']:.3f}"]
    if "best validation" in figures:
        assert trained is not None
        assert is_consistent("train")
        assert figures["best validation"][0].startswith(f"{trained['acceptance_length']:.3f} at step")
    states = json.loads(eyas("status", "-c", run / "run.yaml", "--json").out)["stages"]
    for stage in FOLDERS:
        if states[stage]["state"] == "done":
            assert is_consistent(stage), stage
    for page in (run / "report.html", run / "draft" / "README.md"):
        text = page.read_text() if page.is_file() else ""
        shown = re.search(r"(\d\.\d{3}) decoded", text)
        if shown and "Stale:" not in text:
            current = [one for key, one in finished(run).items() if key.startswith("evaluate")]
            assert records["export"] is not None
            of_this_draft = [o for o in current if o["inputs"]["draft"] == records["export"]["output"]]
            assert shown.group(1) in {f"{o['report']['acceptance']:.3f}" for o in of_this_draft}
            assert is_consistent("export")


def step(rng: random.Random, run_file: Path) -> tuple[list[str], int | None]:
    """Return a command, and the rename before which it is killed, if it is."""
    verb = rng.choice(["run", "run", "train", "export", "evaluate", "extract", "regenerate"])
    words = [verb, "-c", str(run_file), *rng.sample(OVERRIDES, rng.choice([0, 0, 1, 1, 2]))]
    if rng.random() < 0.35:
        words.append("--fresh")
    elif verb == "run" and rng.random() < 0.3:
        words += ["--from", rng.choice(list(FOLDERS))]
    return words, rng.randrange(40) if rng.random() < 0.35 else None


@pytest.fixture(scope="module")
def start(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    assert eyas("run", "-c", write_run(folder, tiny_target)).code == 0
    return folder


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.kills) for seed in range(3, 30))]
)
def test_nothing_is_lost_or_mixed(start: Path, tmp_path: Path, seed: int) -> None:
    run = Path(shutil.copytree(start / "run", tmp_path / "run"))
    run_file = tmp_path / "run.yaml"
    run_file.write_text((start / "run.yaml").read_text().replace(str(start), str(tmp_path)))
    shutil.copy(start / "prompts.jsonl", tmp_path)
    rng = random.Random(seed)
    for _ in range(8):
        before = finished(run)
        words, rename = step(rng, run_file)
        if rename is None:
            screen = eyas(*words)
            assert "should not happen" not in screen.err, (words, screen.err)
        else:
            with killed_at(rename):
                try:
                    eyas(*words)
                except Killed:
                    words.append("(killed)")
        assert not before.keys() - finished(run).keys(), words
        check_shown(run)
    screen = eyas("run", "-c", run_file, "--fresh")
    assert screen.code == 0, screen.err
    assert all(record(run / name) for name in FOLDERS.values())
    assert not list(run.glob("*.redo"))
    check_shown(run)
