"""What a command shows on stderr; as a library eyas shows nothing."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from eyas.progress import LOGGER, Screen, current_screen, on_screen


class _ToScreen(logging.Handler):
    """Shows what is logged on the screen in use."""

    def emit(self, record: logging.LogRecord) -> None:
        current_screen().say(self.format(record))


@contextmanager
def shown() -> Iterator[None]:
    """Show on stderr what eyas says and how work progresses, for as long as a command runs."""
    if any(isinstance(handler, _ToScreen) for handler in LOGGER.handlers):
        yield
        return
    handler, level, propagate = _ToScreen(), LOGGER.level, LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # a library that sets up the root logger would show each line again
    try:
        with on_screen(_screen_of_stderr()):
            yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
        LOGGER.propagate = propagate


def _screen_of_stderr() -> Screen:
    if not sys.stderr.isatty():
        return Screen()
    from eyas.progress_terminal import Terminal  # rich takes a while to import

    return Terminal()
