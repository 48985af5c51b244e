"""What each setting means and where its value came from."""

import json
from typing import Any

from pydantic import BaseModel

from eyas.config.load import LoadedConfig
from eyas.config.schema import RunConfig


def describe_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[tuple[str, str]]:
    """Return (dotted key, description) of every setting."""
    rows: list[tuple[str, str]] = []
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            rows += describe_keys(kind, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, info.description or ""))
    return rows


def to_commented_yaml(loaded: LoadedConfig) -> str:
    """Return the resolved configuration as YAML with each value's origin beside it."""
    lines: list[str] = []
    _write(loaded.config.model_dump(mode="json"), loaded, "", "", lines)
    return "\n".join(lines) + "\n"


def _write(values: dict[str, Any], loaded: LoadedConfig, prefix: str, indent: str, lines: list[str]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            lines.append(f"{indent}{key}:")
            _write(value, loaded, f"{prefix}{key}.", indent + "  ", lines)
        else:
            # JSON scalars and lists are YAML, and never need YAML's quoting rules.
            text = f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}"
            lines.append(f"{text}  # {loaded.origins[prefix + key]}")
