import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from eyas.console import shown
from eyas.progress import Progress, say


@pytest.fixture
def command() -> Iterator[None]:
    """What is said and done inside a command is shown."""
    with shown():
        yield


@pytest.mark.usefixtures("command")
def test_plain_lines_elsewhere_than_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("train", 4, "steps", plain_every_s=0) as progress:
        for _ in range(4):
            progress.advance(1, "loss 1.5")
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("train: 1/4 steps, ")
    assert lines[0].endswith("s left, loss 1.5")
    assert lines[-1].startswith("train: 4/4 steps, ")
    assert "left" not in lines[-1]
    assert "\x1b" not in err


@pytest.mark.usefixtures("command")
def test_a_log_file_gets_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("extract", 1000, "tokens") as progress:
        for _ in range(1000):
            progress.advance(1)
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.usefixtures("command")
def test_the_last_line_appears_when_the_work_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), Progress("train", 2, "steps") as progress:
        progress.advance(1 // (progress.total - 2))
    assert "train: 0/2 steps" in capsys.readouterr().err


@pytest.mark.usefixtures("command")
def test_no_work_at_all_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("extract", 0, "tokens"):
        pass
    assert "extract: 0/0 tokens" in capsys.readouterr().err


@pytest.mark.usefixtures("command")
def test_words_for_a_person_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("hello")
    assert capsys.readouterr() == ("", "hello\n")


def test_nothing_is_shown_to_a_user_of_the_library(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "from eyas.progress import Progress, say\n"
        "say('hello')\n"
        "with Progress('train', 2, 'steps', plain_every_s=0) as progress: progress.advance(2)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert capfd.readouterr() == ("", "")


def test_a_user_of_the_library_can_listen_and_learns_which_module_spoke(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="eyas"):
        say("100 %s done")
    (record,) = caplog.records
    assert (record.name, record.getMessage(), record.module) == ("eyas", "100 %s done", "test_progress")


def test_a_command_shows_a_line_once_and_leaves_the_logger_as_it_was(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("eyas")
    before = logger.level, logger.propagate, list(logger.handlers)
    with shown(), shown():
        say("once")
    assert capsys.readouterr().err == "once\n"
    assert caplog.records == [], "the root logger is not asked to show it again"
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_work_that_has_not_begun_has_no_rate_and_no_time_left() -> None:
    progress = Progress("train", 100, "steps")
    assert progress.text() == "train: 0/100 steps, starting"
    assert (progress.rate, progress.left_s) == (None, None)
    progress.advance(0, "loading the engine")
    assert progress.text() == "train: 0/100 steps, starting, loading the engine"
    assert progress.text(final=True) == "train: 0/100 steps, 0 s, loading the engine"


def test_a_slow_start_is_not_in_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = Progress("train", 100, "steps")
    now += 590
    progress.advance(1)
    assert progress.left_s == pytest.approx(99 * 590), "nothing better is known yet"
    for _ in range(9):
        now += 1
        progress.advance(1)
    assert progress.rate == pytest.approx(1)
    assert progress.left_s == pytest.approx(90)
    assert progress.text(final=True).startswith("train: 10/100 steps, 0.0 steps/s, 599 s")
