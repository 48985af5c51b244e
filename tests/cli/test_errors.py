"""How an error looks, whoever raised it."""

import os
import signal
from pathlib import Path

import pytest

from eyas.errors import ContractError, EyasError, UserError
from eyas.stages import run as run_module
from pipeline import eyas, write_run


@pytest.fixture
def run_file(tmp_path: Path, tiny_target: Path) -> Path:
    return write_run(tmp_path, tiny_target)


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def stage(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(run_module, "run_stage", stage)


@pytest.mark.parametrize(
    ("error", "code", "screen"),
    [
        (UserError("wrong", hint="right"), 2, "error: wrong\nhint: right\n"),
        (EyasError("broken", hint="mend"), 1, "error: broken\nhint: mend\n"),
        (ContractError("not what it claims"), 1, "error: not what it claims\n"),
        (KeyboardInterrupt(), 130, "interrupted; the same command goes on from here\n"),
        (
            OSError(28, "No space left on device"),
            1,
            "error: [Errno 28] No space left on device\n"
            "hint: complete work is kept; mend the cause and run the same command again\n",
        ),
        (
            RuntimeError("first\n  second"),
            1,
            "error: RuntimeError: first second\n"
            "hint: this should not happen; please report what the command says with --debug\n",
        ),
        (
            AssertionError(),
            1,
            "error: AssertionError\n"
            "hint: this should not happen; please report what the command says with --debug\n",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_and_hint_and_no_traceback(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, screen: str
) -> None:
    raising(monkeypatch, error)
    found = eyas("run", "-c", run_file)
    assert (found.code, found.err, found.out) == (code, screen, "")


def test_a_traceback_is_shown_when_asked_for(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, UserError("wrong", hint="right"))
    found = eyas("run", "-c", run_file, "--debug")
    assert found.err.startswith("Traceback")
    assert found.err.endswith("error: wrong\nhint: right\n")


@pytest.mark.parametrize("later", [EyasError("the engine died"), RuntimeError("release unlocked lock")])
def test_what_breaks_while_an_interrupted_command_is_closed_is_not_taken_for_the_reason(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, later: Exception
) -> None:
    def stage(*arguments: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            raise later

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(run_module, "run_stage", stage)
    found = eyas("run", "-c", run_file)
    assert (found.code, found.err) == (130, "interrupted; the same command goes on from here\n")
    assert signal.getsignal(signal.SIGTERM) is before
