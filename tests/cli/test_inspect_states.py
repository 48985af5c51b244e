"""``eyas inspect states``: every byte verified, and what each layer looks like."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from eyas.store.histograms import LayerFigures
from eyas.store.shards import ShardStore
from pipeline import eyas, write_run


@pytest.fixture(scope="module")
def run_file(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("run"), tiny_target)
    for stage in ("prepare", "regenerate", "extract"):
        assert eyas(stage, "-c", path).code == 0
    return path


def test_every_shard_is_verified(run_file: Path) -> None:
    screen = eyas("inspect", "states", "--verify", "-c", run_file)
    assert screen.code == 0, screen.err
    assert "shards are whole" in screen.out
    assert "GiB/s" in screen.err


def test_all_damaged_shards_are_named_at_once(run_file: Path) -> None:
    store = run_file.parent / "run" / "states" / "train"
    kept = {
        name: (store / name).read_bytes() for name in ("shard-00000.safetensors", "shard-00002.safetensors")
    }
    for name, data in kept.items():
        (store / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    screen = eyas("inspect", "states", "--verify", "-c", run_file)
    for name, data in kept.items():
        (store / name).write_bytes(data)
        assert f"{name} is damaged" in screen.err
    assert screen.code == 1
    assert "error: 2 shards are damaged" in screen.err


def test_figures_are_those_of_all_values(run_file: Path) -> None:
    screen = eyas("inspect", "states", "-c", run_file)
    assert screen.code == 0, screen.err
    store = ShardStore(run_file.parent / "run" / "states" / "train")
    everything = torch.cat([store.read(i).aux[:, 1] for i in range(len(store.lengths))]).double()
    (row,) = [line for line in screen.out.split("held_out")[0].splitlines() if " 4 " in line[:8]]
    cells = row.replace("│", " ").split()
    rms = float(everything.square().mean().sqrt())
    wanted = [float(everything.min()), float(everything.max()), float(everything.mean()), rms]
    assert [float(c) for c in cells[1:5]] == pytest.approx(wanted, rel=1e-3)
    assert cells[5:] == ["0.00%", "0.00%"]
    page = (run_file.parent / "run" / "states.html").read_text()
    charts = page.split('<div class="bars">')[1:]
    assert len(charts) == page.count("share of values</h3>") == 8
    for chart in charts:
        shares = [float(text) for text in re.findall(r"--v:([\d.]+)", chart.split("</div>")[0])]
        assert max(shares) == 1
        assert min(shares) >= 0


def test_zeros_repeated_rows_and_sizes_are_counted() -> None:
    rows = torch.tensor([[0.0, 1.5], [0.0, 1.5], [-300.0, 0.0], [-300.0, 0.0]])
    layer = LayerFigures.of(rows, torch.tensor([0, 0, 0, 1]))
    assert (layer.num_zeros, layer.num_repeated, layer.low, layer.high) == (4, 1, -300.0, 1.5)
    bars = dict(layer.histogram())
    assert bars["below -256"] == bars["above 1"] == 0.25
    assert sum(bars.values()) == pytest.approx(1)


def test_a_store_that_is_not_there_is_the_users_mistake(run_file: Path, tmp_path: Path) -> None:
    shutil.copy(run_file, tmp_path / "run.yaml")
    screen = eyas("inspect", "states", "-c", run_file, f"run_dir={tmp_path / 'none'}")
    assert screen.code == 2
    assert "holds no hidden states" in screen.err
