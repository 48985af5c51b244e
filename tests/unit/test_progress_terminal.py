import io
import re
import sys

import pytest
from rich.console import Console

from eyas.console import shown
from eyas.progress import Progress, on_screen, say
from eyas.progress_terminal import Checklist, Terminal


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def console() -> Console:
    return Console(file=Tty(), force_terminal=True, color_system="standard", width=100, emoji=False)


def frames(shown_on: Console) -> list[str]:
    """Return what was drawn, one text for each time the terminal's line was rewritten."""
    assert isinstance(shown_on.file, Tty)
    return re.split(r"\r(?:\x1b\[1A)?\x1b\[2K", re.sub(r"\x1b\[[\d;]*m", "", shown_on.file.getvalue()))


def rows(checklist: Checklist) -> list[str]:
    drawn = console()
    drawn.print(checklist._rows.get_renderable())
    return frames(drawn)[0].splitlines()


def test_one_row_with_bar_rate_and_time_left_is_rewritten_and_leaves_its_last_line() -> None:
    screen = console()
    with on_screen(Terminal(screen)), Progress("train", 10, "steps") as progress:
        progress._every_s = 0
        progress.advance(5, "loss 1.5")
    drawn = frames(screen)
    assert drawn[1].startswith("train: 0/10 ━━━━━━━━━━━━━━━━ starting, ")
    assert "left" not in drawn[1]
    assert drawn[2].startswith("train: 5/10 ━━━━━━━━╺━━━━━━━ ")
    assert " s left, " in drawn[2]
    assert "GiB memory, loss 1.5" in drawn[2]
    assert drawn[-1].startswith("train: 5/10 steps, ")
    assert "left" not in drawn[-1]


def test_words_appear_above_the_row_as_they_were_said() -> None:
    screen = console()
    with on_screen(Terminal(screen)) as terminal, Progress("train", None, "rows"):
        terminal.say("a [bold]word[/] :smile: of more than the width" + "." * 100)
    assert any(
        text.startswith("a [bold]word[/] :smile: of more than the width" + "." * 100 + "\n")
        for text in frames(screen)
    )


def test_a_terminal_without_work_is_a_plain_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Tty()
    monkeypatch.setattr(sys, "stderr", stderr)
    with shown():
        say("hello [1] :smile:")
    assert stderr.getvalue() == "hello [1] :smile:\n"


def test_the_checklist_shows_done_running_and_waiting_stages() -> None:
    screen = console()
    with Checklist(["prepare", "train", "export"], screen) as checklist, shown(), on_screen(checklist):
        checklist.stage("prepare", "done", 3.0)
        checklist.stage("train", "running")
        with Progress("train", 10, "steps") as progress:
            progress._every_s = 0
            progress.advance(5)
            lines = rows(checklist)
        say("a word [in brackets]")
    assert lines[0].split() == ["✓", "prepare", "3.0", "s"]
    assert lines[1].startswith("▸ train       ━━━━━━━━╺━━━━━━━ ")
    assert " left, " in lines[1]
    assert "GiB memory" in lines[1]
    assert lines[2].split() == ["·", "export"]
    assert any("a word [in brackets]\n" in frame for frame in frames(screen))


def test_a_stage_that_failed_or_was_kept_is_told_apart() -> None:
    checklist = Checklist(["prepare", "train"], console())
    checklist.stage("prepare", "kept")
    checklist.stage("train", "failed")
    assert [line.split() for line in rows(checklist)] == [
        ["✓", "prepare", "was", "done"],
        ["✗", "train"],
    ]
