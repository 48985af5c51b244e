"""Who works on a run, as other processes see it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eyas.errors import EyasError, UserError
from eyas.run_process import FOLDER, is_alive, log_path, recorded, refuse_second
from eyas.stages.process import follow, status, stop

SLEEPER = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN if 'deaf' in sys.argv else signal.default_int_handler)\n"
    "from pathlib import Path\n"
    "from eyas.run_process import recorded\n"
    "with recorded(Path(sys.argv[1])):\n"
    "    print('ready', flush=True)\n"
    "    time.sleep(600)\n"
)


def start(run_dir: Path, *words: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(run_dir), *words],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()


def test_a_run_is_seen_refused_a_second_time_and_stopped(tmp_path: Path) -> None:
    child = start(tmp_path)
    try:
        found = status(tmp_path)
        assert (found["state"], found["pid"]) == ("running", child.pid)
        with pytest.raises(UserError, match=f"process {child.pid} already works on"):
            refuse_second(tmp_path)
        assert stop(tmp_path).startswith(f"stopped process {child.pid}")
        assert status(tmp_path)["state"] == "stopped"
    finally:
        end(child)


def test_a_killed_process_has_died_and_can_be_followed_by_another(tmp_path: Path) -> None:
    child = start(tmp_path)
    child.send_signal(signal.SIGKILL)
    child.wait()
    end(child)
    assert status(tmp_path)["state"] == "died"
    with recorded(tmp_path):
        assert status(tmp_path)["state"] == "running"
    assert status(tmp_path)["state"] == "finished"


def test_a_process_that_does_not_end_is_said_with_the_way_to_end_it(tmp_path: Path) -> None:
    child = start(tmp_path, "deaf")
    try:
        with pytest.raises(EyasError, match="has not ended after") as caught:
            stop(tmp_path, wait_s=0.3)
        assert f"kill -9 {child.pid}" in str(caught.value.hint)
    finally:
        end(child)


def test_another_process_of_the_same_number_is_not_taken_for_the_run(tmp_path: Path) -> None:
    with recorded(tmp_path):
        pass
    path = tmp_path / FOLDER / "process.json"
    value = json.loads(path.read_text())
    del value["ended"]
    path.write_text(json.dumps(value | {"pid": os.getpid(), "started": value["started"] - 60}))
    assert not is_alive(json.loads(path.read_text()))
    path.write_text(json.dumps(value | {"pid": os.getpid(), "started": "1"}))  # as an older eyas wrote it
    assert not is_alive(json.loads(path.read_text()))
    with pytest.raises(UserError, match="nothing works on"):
        stop(tmp_path)


def test_a_run_of_another_machine_is_unknown_here(tmp_path: Path) -> None:
    with recorded(tmp_path):
        pass
    path = tmp_path / FOLDER / "process.json"
    value = json.loads(path.read_text()) | {"host": "elsewhere"}
    del value["ended"]
    path.write_text(json.dumps(value))
    assert status(tmp_path)["state"] == "unknown: it ran on elsewhere"


def test_the_log_is_followed_to_the_end_of_the_run(tmp_path: Path) -> None:
    child = start(tmp_path)
    log = log_path(tmp_path)
    log.write_text("one\ntwo\n")
    lines = follow(tmp_path, num_lines=1, on=True)
    try:
        assert next(lines) == "two\n"
        with log.open("a") as f:
            f.write("three\n")
        assert next(lines) == "three\n"
        child.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert list(lines) == []
        assert time.monotonic() - started < 60
    finally:
        end(child)
