"""train.source=stream on two engines in actors of Ray, one of which is killed."""

import threading
from pathlib import Path

import pytest
import torch
from test_extract_fleet import kill_one_at_work
from test_stream_run import STREAM_BYTES, best_weights, record, write_streamed

from pipeline import eyas

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("ray")]


def test_two_engines_one_of_which_dies_train_the_draft_of_one_process(
    tiny_target: Path, tmp_path: Path
) -> None:
    run_file = write_streamed(tmp_path, tiny_target)
    for stage in ("prepare", "regenerate", "extract", "train"):
        assert eyas(stage, "-c", run_file).code == 0
    alone = best_weights(tmp_path)
    history = record(tmp_path, "checkpoints")["history"]

    killed: list[int] = []
    stop = threading.Event()
    killer = threading.Thread(target=kill_one_at_work, args=(killed, stop))
    killer.start()
    settings = ("extract.fleet={replicas: 2, gpus_per_replica: 0}", f"train.stream_bytes={4 * STREAM_BYTES}")
    screen = eyas("train", "-c", run_file, "--fresh", *settings)
    stop.set()
    killer.join()
    assert screen.code == 0, screen.err
    assert len(killed) == 1
    assert "died, 1 unfinished parts go to others" in screen.err
    together = best_weights(tmp_path)
    assert all(torch.equal(alone[name], together[name]) for name in alone)
    assert record(tmp_path, "checkpoints")["history"] == history
    found = record(tmp_path, "checkpoints")["stream"]
    assert found["peak_bytes"] <= STREAM_BYTES
    assert found["num_captured"] == found["num_tokens"]
