"""``eyas extract`` on two engines in actors of Ray, one of which is killed."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from pipeline import eyas, snapshot, write_run

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("ray")]


def kill_one_at_work(killed: list[int], stop: threading.Event) -> None:
    """Kill the first actor that is seen capturing."""
    while not stop.wait(0.02):
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if path.read_bytes().startswith(b"ray::_Actor.do"):
                    pid = int(path.parent.name)
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    return
            except OSError:
                continue


def test_a_fleet_one_of_whose_engines_dies_writes_what_one_process_writes(
    tiny_target: Path, tmp_path: Path
) -> None:
    run_file = write_run(tmp_path, tiny_target, extract={"batch_tokens": 256, "shard_bytes": 20_000})
    for stage in ("prepare", "regenerate", "extract"):
        assert eyas(stage, "-c", run_file).code == 0
    states = tmp_path / "run" / "states"
    alone = {n: digest for n, digest in snapshot(states).items() if n.endswith(".safetensors")}
    assert len(alone) > 6

    killed: list[int] = []
    stop = threading.Event()
    killer = threading.Thread(target=kill_one_at_work, args=(killed, stop))
    killer.start()
    started = time.monotonic()
    screen = eyas("extract", "-c", run_file, "--fresh", "extract.fleet={replicas: 2, gpus_per_replica: 0}")
    stop.set()
    killer.join()
    assert screen.code == 0, screen.err
    assert len(killed) == 1, time.monotonic() - started
    assert "died, " in screen.err
    together = {n: digest for n, digest in snapshot(states).items() if n.endswith(".safetensors")}
    assert together == alone
    assert eyas("train", "-c", run_file).code == 0


def test_a_fleet_that_no_machine_can_hold_is_refused_before_an_engine_starts(
    tiny_target: Path, tmp_path: Path
) -> None:
    run_file = write_run(tmp_path, tiny_target)
    for stage in ("prepare", "regenerate"):
        assert eyas(stage, "-c", run_file).code == 0
    fleet = "extract.fleet={replicas: 2, gpus_per_replica: 8}"
    screen = eyas("extract", "-c", run_file, fleet)
    assert screen.code == 2
    assert "2 replicas of 8 GPUs were asked for, 0 fit the cluster" in screen.err
    started = time.monotonic()
    screen = eyas("extract", "-c", run_file, fleet, "ray.address=127.0.0.1:1")
    assert screen.code == 2
    assert "no Ray cluster answers at 127.0.0.1:1" in screen.err
    assert time.monotonic() - started < 60, "Ray itself tries for minutes"
