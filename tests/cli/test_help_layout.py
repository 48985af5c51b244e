"""The help: whole sentences within 80 columns, and no error for who asks for nothing."""

import re

import pytest

from eyas.cli import cli
from pipeline import eyas

COMMANDS = sorted(cli.commands)
INSPECT = [("inspect", name) for name in cli.commands["inspect"].commands]  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", [(), *((name,) for name in COMMANDS), *INSPECT], ids=" ".join)
def test_no_line_of_a_help_is_cut_or_too_wide(words: tuple[str, ...]) -> None:
    screen = eyas(*words, "--help")
    assert screen.code == 0
    assert not re.search(r"[a-z]\.\.\.", screen.out), "only what may be repeated ends so"
    assert max(map(len, screen.out.splitlines())) <= 80


@pytest.mark.parametrize("words", [(), ("inspect",)])
def test_a_group_without_a_command_shows_its_help(words: tuple[str, ...]) -> None:
    screen = eyas(*words)
    assert (screen.code, screen.err) == (0, "")
    assert screen.out == eyas(*words, "--help").out


def test_every_command_is_in_a_section() -> None:
    text = eyas("--help").out
    assert "\nCommands:" not in text
    for title in ("Pipeline", "Serving", "Look", "Tools"):
        assert f"\n{title}:\n" in text
