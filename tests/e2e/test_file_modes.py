"""Every file and folder of a run has the mode that the umask gives, so that other users can serve it."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eyas.safetensors_io import save_tensors
from pipeline import eyas, write_run


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("umask", [0o022, 0o027], indirect=True, ids=["022", "027"])
def test_every_file_and_folder_of_a_run_has_the_umasks_mode(
    umask: int, tmp_path: Path, tiny_target: Path
) -> None:
    root = tmp_path / "files"
    root.mkdir()
    run_file = write_run(root, tiny_target, export={"format": "speculators"})
    screen = eyas("run", "-c", run_file)
    assert screen.code == 0, screen.err
    found = list((root / "run").rglob("*"))
    assert len([p for p in found if p.suffix == ".safetensors"]) >= 4
    modes = {str(p.relative_to(root)): stat.S_IMODE(p.stat().st_mode) for p in found}
    expected = {str(p.relative_to(root)): (0o777 if p.is_dir() else 0o666) & ~umask for p in found}
    assert modes == expected


@pytest.mark.parametrize("umask", [0o022, 0o077], indirect=True, ids=["022", "077"])
def test_tensors_written_over_a_file_keep_its_mode(umask: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors({"a": torch.ones(2)}, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    path.chmod(0o640)
    save_tensors({"a": torch.zeros(2)}, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
