"""Settings hold no secrets: run.yaml, the report, trackers and a published card show every one of them."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from eyas.errors import UserError

_PASSWORD_IN_URL = re.compile(r"://[^/\s@]*:[^/\s@]*@")
_TOKEN = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{16})")
_NAME = re.compile(
    r"(?i)(^|[-_.?&])(api[-_]?key|token|(auth|access|hf|api)[-_]?token|password|secret|authorization)$"
)
_NAMED = re.compile(r"([\w.-]+)=[^&\s]+")


def refuse_secrets(settings: Iterable[tuple[str, Any]]) -> None:
    """Raises: UserError naming the first setting (dotted key, value) that holds a secret, not showing it."""
    for key, value in settings:
        texts = [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, str)]
        if any(_PASSWORD_IN_URL.search(text) for text in texts):
            raise UserError(
                f"{key} holds a password, and settings are written to run.yaml and the report",
                hint="leave user:password@ out; for an endpoint ~/.netrc may hold them for its host",
            )
        named = (texts and _NAME.search(key)) or any(
            _NAME.search(n) for text in texts for n in _NAMED.findall(text)
        )
        if named or any(_TOKEN.search(text) for text in texts):
            raise UserError(
                f"{key} holds a key or a token, and settings are written to run.yaml and the report",
                hint="leave it to the environment or the login of what needs it, such as HF_TOKEN",
            )


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return a command's words with what its secret flags say left out, to be shown."""
    shown: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        flag, equals, _ = word.partition("=")
        if before.startswith("--") and "=" not in before and _NAME.search(before):
            shown.append("***")
        elif equals and flag.startswith("--") and _NAME.search(flag):
            shown.append(f"{flag}=***")
        else:
            shown.append(_PASSWORD_IN_URL.sub("://***@", _TOKEN.sub("***", word)))
    return shown
