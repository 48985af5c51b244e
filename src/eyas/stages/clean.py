"""clean: frees what a finished run no longer needs and can make again: states, old checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.files import remove_folder
from eyas.locks import hold
from eyas.provenance import stage_states
from eyas.run_folder import FOLDERS, check_is_run, records_of, redo_folder
from eyas.run_process import refuse_second
from eyas.stages.runs import bytes_in
from eyas.train.checkpoint import best_checkpoint


@dataclass(frozen=True)
class Freed:
    """Something that may go, and what it was for."""

    path: Path
    what: str
    num_bytes: int


def freed_by(run_dir: Path) -> list[Freed]:
    """Return what can be freed of a run. Drafts, reports, data and held-out states are never among it.

    Raises: UserError for a folder that is no run.
    """
    check_is_run(run_dir)
    return [Freed(path, what, bytes_in(path)) for path, what in _freed(run_dir)]


def waiting_for_states(run_dir: Path) -> list[Path]:
    """Return the runs next to this one that took its states (``base_run``) and have no draft yet."""
    states = (run_dir / FOLDERS["extract"]).resolve()
    links = run_dir.absolute().parent.glob(f"*/{FOLDERS['extract']}")
    users = [
        run_dir.parent / p.parent.name for p in sorted(links) if p.is_symlink() and p.resolve() == states
    ]
    return [user for user in users if stage_states(records_of(user))["export"].state != "done"]


def clean(run_dir: Path) -> list[Freed]:
    """Free it, as the run's only writer. Raises: UserError while another process is working on the run."""
    refuse_second(run_dir)
    with hold(run_dir / ".lock", str(run_dir)):
        freed = freed_by(run_dir)
        for one in freed:
            remove_folder(one.path) if one.path.is_dir() else one.path.unlink()
    return freed


def _freed(run_dir: Path) -> Iterator[tuple[Path, str]]:
    states = {stage: state.state for stage, state in stage_states(records_of(run_dir)).items()}
    for name in FOLDERS.values():
        if (redone := redo_folder(run_dir / name)).exists():
            yield redone, "unfinished work of --fresh"
    trained = states["export"] == "done"  # what comes after needs the held-out states alone
    extracted, checkpoints = run_dir / FOLDERS["extract"], run_dir / FOLDERS["train"]
    if trained and not extracted.is_symlink() and not waiting_for_states(run_dir):
        for shard in sorted((extracted / "train").glob("*.safetensors")):
            yield shard, "states of the training samples; eyas extract captures them again"
    if trained and not checkpoints.is_symlink():
        best = best_checkpoint(checkpoints)
        for step in sorted(checkpoints.glob("step-*")):
            if step != best:
                yield step, "a checkpoint that is not the best"
