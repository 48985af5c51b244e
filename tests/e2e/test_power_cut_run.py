"""No name that a run gives is lost or cut short by a power cut: every stage syncs before it renames."""

from pathlib import Path

from pipeline import eyas, write_run
from power_cut import watched

STAGES = ("prepare", "regenerate", "extract", "train", "export")


def test_every_stage_has_on_the_disk_what_it_renames_and_the_names_at_its_end(
    tiny_target: Path, tmp_path: Path
) -> None:
    folder = tmp_path.resolve()
    run_file = write_run(folder, tiny_target, train={"save_every": 1})
    for stage in STAGES:
        with watched(folder / "run") as disk:
            screen = eyas(stage, "-c", run_file)
        assert screen.code == 0, screen.err
        assert "stage.json" in disk.renames
        assert disk.exposed == [], stage
        assert disk.forgotten == [], stage
