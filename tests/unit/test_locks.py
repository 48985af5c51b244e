"""Two writers on one folder: the second stops and says who is there; a dead one is in nobody's way."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.errors import UserError
from eyas.locks import hold
from eyas.store.storage import folder_of

HOLD = """
import sys, time
from pathlib import Path
from eyas.locks import hold
with hold(Path(sys.argv[1]), "the folder"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other_writer(tmp_path: Path):  # type: ignore[no-untyped-def]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    arguments = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_writer_stops_with_the_firsts_host_and_process(
    tmp_path: Path, other_writer: subprocess.Popen[str]
) -> None:
    with pytest.raises(UserError) as caught, hold(tmp_path / "lock", "runs/a"):
        pass
    assert caught.value.what == (
        f"runs/a is being written by process {other_writer.pid} on {socket.gethostname()}"
    )
    assert (tmp_path / "lock").is_file(), "the first writer's lock is left alone"


def test_a_dead_writers_lock_is_taken_over(tmp_path: Path, other_writer: subprocess.Popen[str]) -> None:
    other_writer.send_signal(signal.SIGKILL)
    other_writer.wait()
    assert (tmp_path / "lock").is_file()
    with hold(tmp_path / "lock", "runs/a"):
        assert json.loads((tmp_path / "lock").read_text())["process"] == os.getpid()
    assert not (tmp_path / "lock").exists()


def test_a_lock_is_let_go_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), hold(tmp_path / "lock", "runs/a"):
        raise RuntimeError
    with hold(tmp_path / "lock", "runs/a"):
        pass


def test_an_object_store_names_its_writer_and_forgets_a_dead_one() -> None:
    folder = folder_of("memory://locked")
    folder.write("lock", json.dumps({"host": "elsewhere", "process": 7}).encode())
    with pytest.raises(UserError, match="process 7 on elsewhere") as caught, folder.lock():
        pass
    assert "remove memory://locked/lock" in str(caught.value.hint)
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True)
    held_by = {"host": socket.gethostname(), "process": int(gone.stdout)}
    folder.write("lock", json.dumps(held_by).encode())
    with folder.lock():
        assert json.loads(folder.read("lock"))["process"] == os.getpid()
    assert folder.size("lock") is None
