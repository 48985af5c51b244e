"""Errors and signals on the command line: two lines on stderr, and an exit code."""

import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from eyas.console import shown
from eyas.errors import EyasError
from eyas.progress import say


def guarded(debug: bool, function: Callable[..., None], *arguments: Any, **named: Any) -> None:
    """Run a command; show an error as what and hint, and exit with its code."""
    with shown(), _interruptible() as interrupts:
        try:
            function(*arguments, **named)
        except KeyboardInterrupt:
            _leave_interrupted()
        except Exception as error:
            # Ctrl-C in a terminal reaches the engine's processes too, and their end may be seen first.
            if interrupts:
                if debug:
                    traceback.print_exc()
                _leave_interrupted()
            if isinstance(error, EyasError):
                show_error(debug, error.what, error.hint)
                sys.exit(error.exit_code)
            if isinstance(error, BrokenPipeError):  # the reader of a pipe has seen enough
                sys.stderr.close()
                sys.exit(1)
            if isinstance(error, OSError):
                hint = "complete work is kept; mend the cause and run the same command again"
                show_error(debug, str(error), hint)
                sys.exit(1)
            said = f": {' '.join(str(error).split())}" if str(error) else ""
            hint = "this should not happen; please report what the command says with --debug"
            show_error(debug, f"{type(error).__name__}{said}", hint)
            sys.exit(1)


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Let SIGTERM, a scheduler's or eyas stop's, end a command as Ctrl-C does: workers closed, work kept.

    Yields the signals that have come.
    """
    came: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, interrupt)
    if before[signal.SIGINT] is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_interrupted() -> NoReturn:
    say("interrupted; the same command goes on from here")  # of several ranks, the first
    sys.exit(130)


def show_error(debug: bool, what: str, hint: str | None) -> None:
    if debug:
        traceback.print_exc()
    click.echo(f"error: {what}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
