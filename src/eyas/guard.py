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
from eyas.progress_displays import JsonLines


def guarded(debug: bool, function: Callable[..., None], *arguments: Any, **named: Any) -> None:
    """Run a command; show an error as what and hint, and exit with its code.

    A command that answers as JSON also writes its end as an event on stdout, whatever ended it.
    """
    as_json = bool(named.get("as_json"))
    with shown(), _interruptible() as interrupts:
        try:
            function(*arguments, **named)
        except KeyboardInterrupt:
            _leave_interrupted(as_json)
        except Exception as error:
            # Ctrl-C in a terminal reaches the engine's processes too, and their end may be seen first.
            if interrupts:
                if debug:
                    traceback.print_exc()
                _leave_interrupted(as_json)
            if isinstance(error, EyasError):
                show_error(debug, error.what, error.hint, as_json, error.exit_code)
                sys.exit(error.exit_code)
            if isinstance(error, BrokenPipeError):  # the reader of a pipe has seen enough
                sys.stderr.close()
                sys.exit(1)
            if isinstance(error, OSError):
                hint = "complete work is kept; mend the cause and run the same command again"
                show_error(debug, str(error), hint, as_json)
                sys.exit(1)
            said = f": {' '.join(str(error).split())}" if str(error) else ""
            hint = "this should not happen; please report what the command says with --debug"
            show_error(debug, f"{type(error).__name__}{said}", hint, as_json)
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


def _leave_interrupted(as_json: bool) -> NoReturn:
    if as_json:
        JsonLines().event("interrupted", exit_code=130)
    say("interrupted; the same command goes on from here")  # of several ranks, the first
    sys.exit(130)


def show_error(debug: bool, what: str, hint: str | None, as_json: bool = False, exit_code: int = 1) -> None:
    if as_json:
        JsonLines().event("error", what=what, hint=hint, exit_code=exit_code)
    if debug:
        traceback.print_exc()
    click.echo(f"error: {what}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
