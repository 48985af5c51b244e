"""Errors a user sees: what is wrong, how to mend it, and the exit code."""

import difflib
from collections.abc import Iterable


class EyasError(Exception):
    """Something failed that is not the user's mistake (exit code 1)."""

    exit_code = 1

    def __init__(self, what: str, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __reduce__(self) -> tuple[type, tuple[str, str | None]]:
        return type(self), (self.what, self.hint)  # errors come from other processes too

    def __str__(self) -> str:
        return f"{self.what}\nhint: {self.hint}" if self.hint else self.what


class UserError(EyasError):
    """The input or the configuration is wrong (exit code 2); nothing has been written."""

    exit_code = 2


class ContractError(EyasError):
    """A check at a boundary found data that is not what it claims to be (exit code 1)."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
