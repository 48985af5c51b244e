"""What each setting means and where its value came from."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from eyas import registry
from eyas.config.keys import own_fields, section_of, settings
from eyas.config.load import OWN_FOLDER, LoadedConfig
from eyas.config.paths import paths_to
from eyas.config.schema import DraftSettings, RunConfig, draft_settings_of


def describe_keys() -> list[tuple[str, str]]:
    """Return (dotted key, description) of every setting."""
    return [(key, info.description or "") for key, info in settings()]


def to_markdown() -> str:
    """Return the reference of all settings as a page: docs/reference/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "Generated from the schema by `eyas config --markdown`. A run file holds these sections;",
        "on the command line a setting is `SECTION.KEY=VALUE`, the value as in YAML.",
        "`eyas config -c run.yaml` shows a run's values and where each comes from.",
        "A relative path in a run file starts at its folder; on the command line, at the current folder.",
    ]
    _table("", RunConfig.model_fields, lines)
    for name, info in RunConfig.model_fields.items():
        section = section_of(info)
        if section is None:
            continue
        lines += ["", f"## {name}", "", (section.__doc__ or "").strip()]
        _table(f"{name}.", section.model_fields, lines)
        if section is DraftSettings:
            for architecture in sorted(registry.drafters()):
                kind = draft_settings_of(architecture)
                lines += ["", f"### draft.architecture={architecture}", "", (kind.__doc__ or "").strip()]
                _table(f"{name}.", own_fields(kind), lines)
    return "\n".join(lines) + "\n"


def _table(prefix: str, fields: Mapping[str, FieldInfo], lines: list[str]) -> None:
    lines += ["", "| setting | kind | default | meaning |", "| --- | --- | --- | --- |"]
    for name, info in fields.items():
        if section_of(info) is not None:
            continue
        default = "required" if info.is_required() else f"`{_shown(info.default)}`"
        meaning = (info.description or "").replace("|", "\\|")
        lines.append(f"| `{prefix}{name}` | {_kind(info.annotation)} | {default} | {meaning} |")


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        default = list(default)
    return json.dumps(default, ensure_ascii=False, default=str)


def _kind(annotation: Any) -> str:
    """Return a type as a person names it: ``int | None`` is a whole number, or null."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is Annotated:
        return _kind(inner[0])
    if origin is tuple:
        return f"list of {_kind(inner[0])}"
    if origin is dict:
        return "mapping"
    if inner:
        return " or ".join(_kind(one) for one in inner)
    names = {
        str: "text",
        int: "whole number",
        float: "number",
        bool: "true or false",
        Path: "path",
        type(None): "null",
    }
    return names.get(annotation, "mapping")


def to_commented_yaml(loaded: LoadedConfig, folder: Path | None = None) -> str:
    """Return the resolved configuration as YAML with each value's origin next to it.

    With ``folder`` it is for the run.yaml of that run folder: relative paths start there.
    """
    lines: list[str] = []
    values = loaded.config.model_dump(mode="json")
    if folder is not None:
        paths_to(folder, values)
        values["run_dir"] = OWN_FOLDER
    _write(values, loaded, "", "", lines)
    return "\n".join(lines) + "\n"


def _write(values: dict[str, Any], loaded: LoadedConfig, prefix: str, indent: str, lines: list[str]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            lines.append(f"{indent}{key}:")
            _write(value, loaded, f"{prefix}{key}.", indent + "  ", lines)
        else:
            lines.append(f"{indent}{key}: {_in_yaml(value)}  # {loaded.origins[prefix + key]}")


def _in_yaml(value: Any) -> str:
    """Return a value as JSON, which is YAML and never needs its quoting rules, except for some numbers."""
    text = json.dumps(value, ensure_ascii=False)
    # YAML 1.1 takes 1e-05 for text.
    return re.sub(r"(?<![\d.])(\d+)e(?=[-+]?\d)", r"\1.0e", text) if isinstance(value, float) else text
