"""Prompt sets that drafts are measured on: known by name, or files of the same shape.

A row is ``{"suite", "id", "category", "turns"}``; anything else that ``data.sources`` reads will do, with the
source as its suite.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.data.answer_slots import answer_slots
from eyas.data.long_prompts import LONG, long_rows
from eyas.data.row_formats import parse_row
from eyas.data.sources import Drop, Row, read_source, source_fingerprint
from eyas.errors import UserError, did_you_mean
from eyas.files import fingerprint
from eyas.types import Conversation


@dataclass(frozen=True)
class _HubSet:
    """Where a known benchmark lies, and the columns that hold what it asks and of which kind it is."""

    source: str
    prompt: str
    category: str | None = None


# Rendered as a user's message each; HumanEval's completion prompt with a request in front of it.
_HUB_SETS = {
    "mt-bench": _HubSet("hf:HuggingFaceH4/mt_bench_prompts:train", "prompt", "category"),
    "humaneval": _HubSet("hf:openai/openai_humaneval:test", "prompt"),
    "gsm8k": _HubSet("hf:openai/gsm8k:main:test", "question"),
}
_HUMANEVAL_REQUEST = "Complete the following Python function. Answer with the whole function.\n\n"


@dataclass(frozen=True)
class BenchmarkPrompt:
    """A conversation to be answered turn by turn, of a suite and a category."""

    suite: str
    category: str
    conversation: Conversation


def read_benchmark(name: str, limit: int, role_map: Mapping[str, str]) -> list[BenchmarkPrompt]:
    """Return at most ``limit`` prompts of each suite in ``name``, evenly over its categories.

    Raises: UserError for an unknown name or a source without a usable row.
    """
    known = _known(name)
    rows = long_rows() if name == LONG else read_source(known.source if known else name)
    found = [_prompt(row, name, known, role_map) for row in rows if not isinstance(row, Drop)]
    prompts = [p for p in found if p is not None]
    if not prompts:
        raise UserError(f"{name} holds no prompt", hint='a row is {"id", "category", "turns": ["..."]}')
    suites = _grouped(prompts, lambda p: p.suite)
    return [p for suite in suites.values() for p in _spread(suite, limit)]


def benchmark_fingerprint(name: str) -> str:
    """Identify the prompts of a benchmark: their own or its file's bytes, or the name of a hub data set."""
    if name == LONG:
        return fingerprint([row.value for row in long_rows()])
    known = _known(name)
    return source_fingerprint(known.source if known else name)


def _known(name: str) -> _HubSet | None:
    known = _HUB_SETS.get(name.lower().replace("_", "-"))
    if known is None and name != LONG and not _looks_like_source(name):
        names = (*_HUB_SETS, LONG)
        raise UserError(
            f"unknown benchmark {name!r}{did_you_mean(name, names)}",
            hint=f"known: {', '.join(names)}; or a file, or hf:owner/name:split",
        )
    return known


def _looks_like_source(name: str) -> bool:
    return name.startswith("hf:") or any(c in name for c in "./*")


def _prompt(
    row: Row, name: str, known: _HubSet | None, role_map: Mapping[str, str]
) -> BenchmarkPrompt | None:
    value: Any = row.value
    suite, category = name, "all"
    if known is not None:
        asked = value[known.prompt]
        if isinstance(asked, str):
            asked = [_HUMANEVAL_REQUEST + asked if "humaneval" in known.source else asked]
        category = str(value[known.category]) if known.category else "all"
        value = {"id": row.place, "turns": list(asked)}
    elif isinstance(value, Mapping):
        suite, category = str(value.get("suite", name)), str(value.get("category", "all"))
    record = parse_row(Row(row.place, value), role_map).record
    if not isinstance(record, Conversation) or not answer_slots(record):
        return None
    return BenchmarkPrompt(suite, category, record)


def _grouped(prompts: Sequence[BenchmarkPrompt], key: Any) -> dict[str, list[BenchmarkPrompt]]:
    groups: dict[str, list[BenchmarkPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(key(prompt), []).append(prompt)
    return groups


def _spread(prompts: Sequence[BenchmarkPrompt], limit: int) -> Iterator[BenchmarkPrompt]:
    """Take one of each category in turn, so that any share of a suite holds all of them."""
    columns = _grouped(prompts, lambda p: p.category).values()
    turns = itertools.chain.from_iterable(itertools.zip_longest(*columns))
    return itertools.islice((p for p in turns if p is not None), limit)
