"""Two writers on one folder: the second stops and says who is there; a dead one is in nobody's way."""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eyas import locks
from eyas.errors import UserError
from eyas.locks import hold, is_dead, owner, refusal
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


def test_the_refusal_shows_the_command_of_the_first_writer(
    tmp_path: Path, other_writer: subprocess.Popen[str]
) -> None:
    with pytest.raises(UserError) as caught, hold(tmp_path / "lock", "runs/a"):
        pass
    assert caught.value.hint == (
        f"it runs '-c {tmp_path / 'lock'}'; wait for it, or stop it; the same command then goes on"
    )


def test_a_second_thread_of_one_process_is_a_second_writer(tmp_path: Path) -> None:
    def second() -> None:
        with hold(tmp_path / "lock", "runs/a"):
            pass

    with hold(tmp_path / "lock", "runs/a"), ThreadPoolExecutor(1) as pool:
        with pytest.raises(UserError, match=f"process {os.getpid()} on"):
            pool.submit(second).result()
        assert (tmp_path / "lock").is_file()
    assert not (tmp_path / "lock").exists()


def test_one_of_many_threads_holds_a_lock_that_is_removed_again_and_again(tmp_path: Path) -> None:
    inside, most = [], []

    def write(_: int) -> None:
        with contextlib.suppress(UserError), hold(tmp_path / "lock", "runs/a"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.0002)
            inside.pop()

    deadline = time.monotonic() + 60
    with ThreadPoolExecutor(8) as pool:
        while len(most) < 3 and time.monotonic() < deadline:  # on a busy machine one may hold it for all 400
            list(pool.map(write, range(400)))
    assert max(most) == 1
    assert len(most) > 1


def test_a_file_that_vanishes_before_it_is_compared_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, looks = tmp_path / "lock", []
    fstat = os.fstat

    def vanish(file: int) -> os.stat_result:
        if not looks:
            looks.append(file)
            path.unlink()  # as the holder before does it
        return fstat(file)

    monkeypatch.setattr(os, "fstat", vanish)
    with hold(path, "runs/a"):
        assert json.loads(path.read_text())["process"] == os.getpid()
    assert looks


def test_a_later_process_of_the_dead_holders_number_is_not_the_holder() -> None:
    this = json.loads(owner())
    assert not is_dead(json.dumps(this).encode())
    assert is_dead(json.dumps(this | {"started": this["started"] - 60}).encode())
    assert not is_dead(json.dumps(this | {"started": None}).encode()), "an older eyas did not write it"


def test_without_locks_of_the_file_system_the_owner_in_the_file_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, *, blocking: bool) -> bool:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(locks, "lock_descriptor", refuse)
    path = tmp_path / "lock"
    with hold(path, "runs/a"):
        with pytest.raises(UserError, match=f"process {os.getpid()} on") as caught, hold(path, "runs/a"):
            pass
        assert str(caught.value.hint).endswith(f"if it no longer runs, remove {path}")
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True)
    path.write_text(json.dumps({"host": socket.gethostname(), "process": int(gone.stdout)}))
    with hold(path, "runs/a"):
        assert json.loads(path.read_text())["process"] == os.getpid()


@pytest.mark.parametrize("held_by", [b"", b"[]", b"{}", b'{"host": "a", "process": "b"}', b"\xff"])
def test_an_unreadable_owner_is_an_unknown_one(held_by: bytes) -> None:
    error = refusal("runs/a", held_by, "wait")
    assert error.what == "runs/a is being written by process unknown on an unknown host"
    assert not is_dead(held_by)


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
