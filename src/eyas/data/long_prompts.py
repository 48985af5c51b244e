"""Long prompts that need no download: questions about modules of Python's standard library (PSF licence).

Each size is a category, so that acceptance by category is acceptance by the length of the context. Other
versions of Python have other modules: results of two machines compare where their fingerprints are equal.
"""

import importlib.util
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from eyas.data.sources import Row
from eyas.errors import UserError

LONG = "long"
# In characters; a token of code is about three and a half of them.
_SIZES = (6_000, 12_000, 24_000, 48_000, 96_000)
_MODULES = (
    "argparse", "configparser", "dataclasses", "difflib", "doctest", "enum", "fractions", "inspect",
    "ipaddress", "mailbox", "optparse", "pickle", "plistlib", "shutil", "statistics", "subprocess", "tarfile",
    "threading",
)  # fmt: skip
_QUESTIONS = (
    "Write unit tests for the last function or class of this code.",
    "Explain step by step what the last function or class of this code does.",
    "Rewrite the last function of this code with type annotations and a docstring.",
)


def long_rows() -> Iterator[Row]:
    """Yield a prompt of every size for every module, which it starts with.

    Raises: UserError where Python's modules cannot be read as files.
    """
    sources = [_source(name) for name in _MODULES]
    for number, name in enumerate(_MODULES):
        code = "\n".join(sources[number:] + sources[:number])
        question = _QUESTIONS[number % len(_QUESTIONS)]
        for size in _SIZES:
            turn = f"Here is some Python code.\n\n```python\n{_beginning(code, size)}```\n\n{question}"
            row = {"suite": LONG, "id": f"{name}-{size}", "category": _category(size), "turns": [turn]}
            yield Row(f"{LONG}:{name}-{size}", row)


def _category(size: int) -> str:
    return f"{size // 1000}k characters"


def _beginning(code: str, size: int) -> str:
    """Return as many whole lines as ``size`` characters hold."""
    lines = code.splitlines(keepends=True)
    return "".join(line for line, end in zip(lines, accumulate(map(len, lines)), strict=True) if end <= size)


def _source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    try:
        return Path(str(spec and spec.origin)).read_text(encoding="utf-8")
    except OSError:
        raise UserError(
            f"the source of module {name}, from which the benchmark {LONG} is made, is not a file here",
            hint="name another benchmark or a file",
        ) from None
