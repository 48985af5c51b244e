import io
import sys

import pytest

from eyas.progress import Progress, say


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def test_a_log_file_gets_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("extract", 1000, "tokens") as progress:
        for _ in range(1000):
            progress.advance(1)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_one_line_is_rewritten_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("train", 2, "steps") as progress:
        progress.advance(2)
    text = terminal.getvalue()
    assert text.count("\n") == 1
    assert text.startswith("\r\x1b[K")


def test_the_last_line_appears_when_the_work_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), Progress("train", 2, "steps") as progress:
        progress.advance(1 // (progress.total - 2))
    assert "train: 0/2 steps" in capsys.readouterr().err


def test_no_work_at_all_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("extract", 0, "tokens"):
        pass
    assert "extract: 0/0 tokens" in capsys.readouterr().err


def test_words_for_a_person_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("hello")
    assert capsys.readouterr() == ("", "hello\n")
