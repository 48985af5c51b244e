"""Dataclasses from JSON: every field, no other, each of its type, as pydantic checks it."""

import dataclasses
import json
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def parse(kind: type[T], value: Any) -> T:
    """Build a dataclass from what JSON holds of it; lists become tuples where its types say so.

    Raises: ValueError with one line that names the field; what the dataclass itself refuses.
    """
    from pydantic import ValidationError  # too slow to import for eyas --help

    names = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if not isinstance(value, dict):
        raise ValueError("it is no object of named fields")
    if set(value) != names:
        raise ValueError(f"it has other fields: {sorted(set(value) ^ names)}")
    try:
        return _adapter(kind).validate_json(json.dumps(value), strict=True)  # type: ignore[arg-type]  # a class is hashable
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}, not {_shown(first['input'])}") from None


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
