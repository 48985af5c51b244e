"""A kill before any change of a file, in any stage: the next command ends with the same bytes and no more."""

import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from eyas.run_folder import FOLDERS, redo_folder
from faults import Plan, contents, during, in_child, signal_self
from pipeline import eyas, write_run

pytestmark = pytest.mark.kills

KILL = signal_self(signal.SIGKILL)
STORED = ("prepare", "regenerate", "extract", "train", "export", "evaluate")
STREAMED = ("prepare", "regenerate", "extract", "train")


@dataclass
class Run:
    """A run file, and what its folder holds before each stage and after the last."""

    folder: Path
    run_file: Path
    stages: tuple[str, ...]
    num_operations: dict[str, int] = field(default_factory=dict)

    def make(self) -> None:
        """Run the stages and keep what each started from."""
        for stage in self.stages:
            self.keep(f"before-{stage}")
            plan = Plan("change", f"*{self.folder.name}/run/*", KILL, nth=1 << 30)
            screen = during(plan, lambda stage=stage: eyas(stage, "-c", self.run_file))
            assert screen.code == 0, screen.err
            self.num_operations[stage] = len(plan.seen)
            self.keep(f"after-{stage}")

    def keep(self, name: str) -> None:
        if (self.folder / "run").exists():
            shutil.copytree(self.folder / "run", self.folder / name)
        else:
            (self.folder / name).mkdir()

    def go_back_before(self, stage: str) -> None:
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        if any((self.folder / f"before-{stage}").iterdir()):
            shutil.copytree(self.folder / f"before-{stage}", self.folder / "run")


@pytest.fixture(scope="module")
def runs(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    made = {}
    for name, stages, train in (
        ("stored", STORED, {"save_every": 1}),
        ("streamed", STREAMED, {"save_every": 1, "source": "stream", "keep_states": True}),
    ):
        folder = tmp_path_factory.mktemp(name)
        settings: dict[str, Any] = {"train": train}
        made[name] = Run(folder, write_run(folder, tiny_target, **settings), stages)
        made[name].make()
    return made


def paths_of(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


@pytest.mark.parametrize(
    ("name", "stage"),
    [*(("stored", stage) for stage in STORED), ("streamed", "extract"), ("streamed", "train")],
)
def test_a_kill_before_a_file_operation_leaves_nothing_that_the_next_command_does_not_put_right(
    runs: dict[str, Run], name: str, stage: str
) -> None:
    run = runs[name]
    after = run.folder / f"after-{stage}"
    wanted, num = contents(after), run.num_operations[stage]
    assert num > 5
    for nth in range(1, num + 1):
        run.go_back_before(stage)
        plan = Plan("change", f"*{run.folder.name}/run/*", KILL, nth)
        killed = in_child(plan, stage, "-c", run.run_file)
        assert killed.code in (-9, 0), (nth, killed)
        screen = eyas(stage, "-c", run.run_file)
        assert screen.code == 0, (nth, screen.err)
        assert paths_of(run.folder / "run") == paths_of(after), nth
        found = contents(run.folder / "run")
        assert [path for path in wanted if found[path] != wanted[path]] == [], nth


@pytest.mark.parametrize("stage", ["prepare", "export"])
def test_a_kill_while_a_stage_is_made_anew_loses_nothing_and_the_same_command_ends_it(
    runs: dict[str, Run], stage: str
) -> None:
    run = runs["stored"]
    after = run.folder / f"after-{stage}"
    wanted, num = contents(after), run.num_operations[stage]
    for nth in range(1, num + 20):
        shutil.rmtree(run.folder / "run", ignore_errors=True)
        shutil.copytree(after, run.folder / "run")
        plan = Plan("change", f"*{run.folder.name}/run/*", KILL, nth)
        in_child(plan, stage, "--fresh", "-c", run.run_file)
        for command, kept in (
            ((stage,), {redo_folder(Path(FOLDERS[stage])).name}),
            ((stage, "--fresh"), set()),
        ):
            screen = eyas(*command, "-c", run.run_file)
            assert screen.code == 0, (nth, screen.err)
            paths = {path for path in paths_of(run.folder / "run") if path.split("/")[0] not in kept}
            assert paths == paths_of(after), (nth, command)
            found = contents(run.folder / "run")
            assert [path for path in wanted if found[path] != wanted[path]] == [], (nth, command)
