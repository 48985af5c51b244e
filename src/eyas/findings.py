"""What ``eyas doctor`` says of one thing that it looked at."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and how to fix it where it is not well."""

    subject: str
    state: State
    text: str
    remedy: str | None = None
