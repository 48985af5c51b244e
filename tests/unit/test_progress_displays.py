import json
from pathlib import Path

import pytest

from eyas.console import shown
from eyas.progress import Progress, Screen, on_screen, say
from eyas.progress_displays import JsonLines, StatusFile, duration


def test_json_lines_are_one_object_a_line_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    screen = JsonLines()
    with shown(), on_screen(screen):
        screen.stage("train", "running")
        say("hello")
        with Progress("train", 2, "steps", plain_every_s=0) as progress:
            progress.advance(2, "loss 1.5")
    out, err = capsys.readouterr()
    events = [json.loads(line) for line in out.splitlines()]
    assert err == ""
    assert [e["event"] for e in events] == ["stage", "message", "progress", "progress"]
    assert (
        events[-1] | {"done": 2, "total": 2, "unit": "steps", "note": "loss 1.5", "final": True} == events[-1]
    )
    assert events[-1]["memory_bytes"] > 1 << 20


def test_the_status_file_says_what_is_done_now_and_the_screen_behind_is_told_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "progress.json"
    with on_screen(StatusFile(Screen(), path)) as screen:
        screen.stage("train", "running")
        with Progress("train", 4, "steps") as progress:
            progress.advance(1)
            now = json.loads(path.read_text())
            assert now["stages"]["train"]["state"] == "running"
    last = json.loads(path.read_text())
    assert last["progress"]["done"] == 1
    assert last["text"].startswith("train: 1/4 steps, ")
    assert capsys.readouterr().err.startswith("train: 1/4 steps, ")


def test_the_status_file_says_what_starts_before_anything_is_done(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    with on_screen(StatusFile(Screen(), path)), Progress("extract", 40, "tokens"):
        now = json.loads(path.read_text())
    assert now["text"] == "extract: 0/40 tokens, starting"
    assert (now["progress"]["rate"], now["progress"]["left_s"]) == (None, None)


def test_a_log_behind_a_status_file_stays_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with on_screen(StatusFile(Screen(), tmp_path / "p.json")), Progress("train", 100, "steps") as progress:
        progress._every_s = 0  # as if a second passed between two steps
        for _ in range(100):
            progress.advance(1)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_screens_are_taken_back() -> None:
    from eyas.progress import current_screen

    with on_screen(JsonLines()) as inner:
        assert current_screen() is inner
    assert current_screen() is not inner


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.21, "3.2 s"), (45, "45 s"), (720, "12 min"), (12_000, "3 h 20 min"), (187_200, "2 d 4 h")],
)
def test_durations_as_a_person_says_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
