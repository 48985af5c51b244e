"""Whatever happens in the middle of a stage: the same command again ends with the same bytes."""

import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from eyas import registry
from faults import Plan, Strike, contents, fail, in_child, signal_self
from pipeline import eyas, write_run

FULL_DISK, BROKEN_DISK = fail(28), fail(5)
KILL, INTERRUPT, TERMINATE = (signal_self(s) for s in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM))
STAGES = ["prepare", "regenerate", "extract", "train", "export"]


@dataclass(frozen=True)
class Run:
    """A run and what its folder holds before and after each stage."""

    run_file: Path
    snapshots: dict[str, Path]

    @property
    def folder(self) -> Path:
        return self.run_file.parent / "run"

    def go_back_before(self, stage: str) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        at = STAGES.index(stage)
        if at:
            shutil.copytree(self.snapshots[STAGES[at - 1]], self.folder)


@pytest.fixture(scope="module")
def run(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("whole")
    run_file = write_run(folder, tiny_target, train={"save_every": 1})
    snapshots = {}
    for stage in STAGES:
        assert eyas(stage, "-c", run_file).code == 0
        snapshots[stage] = folder / f"after-{stage}"
        shutil.copytree(folder / "run", snapshots[stage])
    return Run(run_file, snapshots)


# stage: moment (event, path, which of them)
MOMENTS: dict[str, tuple[str, str, str, int]] = {
    "prepare opens its samples": ("prepare", "open", "*prepared/drops.jsonl", 1),
    "prepare describes its work": ("prepare", "os.rename", "*prepared/manifest.json", 1),
    "prepare records that it is done": ("prepare", "os.rename", "*prepared/stage.json", 2),
    "regenerate starts": ("regenerate", "os.rename", "*regenerated/stage.json", 1),
    "regenerate reads its journal": ("regenerate", "open", "*regenerated/answers.jsonl", 1),
    "regenerate flushes its samples": ("regenerate", "open", "*regenerated/samples.parquet", 1),
    "regenerate records that it is done": ("regenerate", "os.rename", "*regenerated/stage.json", 2),
    "extract writes its contract": ("extract", "os.rename", "*states/train/manifest.json", 1),
    "extract flushes a shard": ("extract", "open", "*states/train/.shard-00001*", 1),
    "extract renames a shard": ("extract", "os.rename", "*states/train/shard-00002.safetensors", 1),
    "extract journals a shard": ("extract", "open", "*states/train/journal.jsonl", 3),
    "extract begins the held-out part": (
        "extract",
        "os.rename",
        "*held_out/shard-00000.safetensors",
        1,
    ),
    "extract records that it is done": ("extract", "os.rename", "*states/stage.json", 2),
    "train logs a step": ("train", "open", "*checkpoints/metrics.jsonl", 3),
    "train flushes a checkpoint": ("train", "open", "*checkpoints/.step-000002*optimizer*", 1),
    "train renames its first checkpoint": ("train", "os.rename", "*/checkpoints/step-000002", 1),
    "train marks the best": ("train", "os.rename", "*checkpoints/best.json", 1),
    "train moves an old checkpoint away": ("train", "os.rename", "*checkpoints/.step-*.old", 1),
    "train removes an old checkpoint": ("train", "os.remove", "*checkpoint.json", 1),
    "train records that it is done": ("train", "os.rename", "*checkpoints/stage.json", 2),
    "export writes its folder": ("export", "open", "*/.draft.*config.json*", 1),
    "export moves the folder away that is replaced": ("export", "os.rename", "*run/.draft.*.old", 1),
    "export moves its folder in": ("export", "os.rename", "*run/draft", 1),
    "export records that it is done": ("export", "os.rename", "*draft/stage.json", 2),
}
STRIKES: dict[str, Strike] = {
    "kill -9": KILL,
    "SIGINT": INTERRUPT,
    "SIGTERM": TERMINATE,
    "a full disk": FULL_DISK,
    "an I/O error": BROKEN_DISK,
}
# Every moment is met by a kill; every other fault by every stage.
CASES = [(moment, "kill -9") for moment in MOMENTS] + [
    (moment, list(STRIKES)[1:][number % 4]) for number, moment in enumerate(MOMENTS)
]


def assert_ends_the_same(run: Run, stage: str) -> None:
    screen = eyas(stage, "-c", run.run_file)
    assert screen.code == 0, screen.err
    found, wanted = contents(run.folder), contents(run.snapshots[stage])
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []


@pytest.mark.parametrize(("moment", "fault"), CASES, ids=[f"{f} when {m}" for m, f in CASES])
def test_the_same_command_again_ends_with_the_same_bytes(run: Run, moment: str, fault: str) -> None:
    stage, event, pattern, nth = MOMENTS[moment]
    run.go_back_before(stage)
    plan = Plan(event, pattern, STRIKES[fault], nth)
    screen = in_child(plan, stage, "-c", run.run_file)
    # A folder that cannot be written at the start is the user's to mend (2), later it is a failure (1).
    codes = {"kill -9": (-9,), "SIGINT": (130,), "SIGTERM": (130,)}.get(fault, (1, 2))
    assert screen.code in codes, screen
    assert_ends_the_same(run, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_at_any_file_operation_loses_nothing(run: Run, stage: str) -> None:
    """Kill, go on, kill again, at operations drawn at random, until the stage comes through."""
    dice = random.Random(stage)
    run.go_back_before(stage)
    kills = 0
    for _ in range(4):
        plan = Plan("any", f"*{run.folder.name}/*", KILL, dice.randrange(5, 60))
        kills += in_child(plan, stage, "-c", run.run_file).code == -9
    assert kills
    assert_ends_the_same(run, stage)


@pytest.mark.parametrize("stage", ["regenerate", "extract"])
def test_an_engine_that_dies_loses_only_what_was_in_flight(
    run: Run, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.go_back_before(stage)
    monkeypatch.setitem(registry.ENGINES, "transformers", "bad_engines:CrashingInfo")
    screen = eyas(stage, "-c", run.run_file)
    assert screen.code == 1
    assert "CUDA error: out of memory" in screen.err
    monkeypatch.undo()
    assert_ends_the_same(run, stage)


@pytest.fixture
def small_disk(run: Run) -> Iterator[Callable[[int], None]]:
    """Mount a small file system on the run folder; the function changes its size."""

    def resize(size: int, how: str = "remount,") -> None:
        options = ["mount", "-t", "tmpfs", "-o", f"{how}size={size}", "tmpfs", str(run.folder)]
        subprocess.run(options, check=True, capture_output=True)

    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir()
    try:
        resize(1 << 20, how="")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no permission to mount a tmpfs")
    try:
        yield resize
    finally:
        subprocess.run(["umount", "--lazy", str(run.folder)], check=True)


@pytest.mark.parametrize(("stage", "share"), [("regenerate", 0.0), ("extract", 0.4), ("train", 0.5)])
def test_a_disk_that_fills_up_stops_the_stage_and_room_lets_it_go_on(
    run: Run, small_disk: Callable[[int], None], stage: str, share: float
) -> None:
    before, after = run.snapshots[STAGES[STAGES.index(stage) - 1]], run.snapshots[stage]
    used, wanted = (sum(-(-p.stat().st_size // 4096) * 4096 for p in f.rglob("*")) for f in (before, after))
    small_disk(64 << 20)
    shutil.copytree(before, run.folder, dirs_exist_ok=True)
    small_disk(int(used + 16384 + share * (wanted - used)))
    screen = eyas(stage, "-c", run.run_file)
    assert screen.code == 1
    assert "No space left on device" in screen.err
    assert "mend the cause and run the same command again" in screen.err
    small_disk(64 << 20)
    assert_ends_the_same(run, stage)
