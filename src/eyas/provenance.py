"""Whether the output of a stage is still current, and if it is not, why, in words.

A stage records its inputs: settings by section, and the fingerprints of the outputs that it was made from.
All verbs compare these records here, so that they give the same answer.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eyas.config.load import flatten

Record = Mapping[str, Any]

# The inputs of a stage that are outputs of an earlier one; the samples come from either of two.
_SAMPLES = ("regenerate", "prepare")
_OUTPUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "regenerate": {"prepared": ("prepare",)},
    "extract": {"samples": _SAMPLES},
    "train": {"states": ("extract",), "samples": _SAMPLES},
    "export": {"checkpoint": ("train",)},
    "evaluate": {"draft": ("export",), "states": ("extract",)},
}
# Inputs that are fingerprints of files, as a person names them.
_FILES = {
    "sources": "the files of data.sources",
    "imported": "the samples of extract.prepared_data",
    "init_from": "the files of draft.init_from",
    "splits": "the splits whose states are stored (train.source)",
    "benchmarks": "the prompts of evaluate.benchmarks",
    "tokenizer": "the target's tokenizer",
    "template": "the target's chat template",
    "target": "the target, or the layers that are read of it,",
    "target.weights_fingerprint": "the target's weights",
    "target.tokenizer_fingerprint": "the target's tokenizer",
    "target.template_fingerprint": "the target's chat template",
}
# Inputs whose setting has a longer name.
_SETTINGS = {"max_length": "data.max_length", "validation_fraction": "data.validation_fraction"}
_LONGEST = 60


@dataclass(frozen=True)
class StageState:
    """How far a stage is; ``cause`` says why a finished output is stale."""

    state: Literal["not begun", "begun", "done", "stale"]
    cause: str | None = None


def stage_states(
    records: Mapping[str, Record | None], settings: Mapping[str, Any] | None = None
) -> dict[str, StageState]:
    """Return the state of each stage, in the order of ``records``.

    A finished stage is stale when an output that it was made from was made again, when an earlier stage is
    stale or not finished, or when it was made with other ``settings`` (nested, as a run file has them).
    """
    states: dict[str, StageState] = {}
    for stage, record in records.items():
        if record is None:
            states[stage] = StageState("not begun")
        elif not record["done"]:
            states[stage] = StageState("begun")
        else:
            cause = next(_causes(stage, record, records, states, settings or {}), None)
            states[stage] = StageState("stale" if cause else "done", cause)
    return states


def difference(
    stage: str, made: Mapping[str, Any], now: Mapping[str, Any], records: Mapping[str, Any]
) -> str:
    """Say in words what differs first between the inputs that a stage was made from and those of now."""
    before, after = dict(flatten(dict(made))), dict(flatten(dict(now)))
    differing = [key for key in [*after, *before] if before.get(key) != after.get(key)]
    assert differing, "the inputs do not differ"
    # A setting says more than a fingerprint that follows from it.
    key = next((k for k in differing if _setting(stage, k) is not None), differing[0])
    if (setting := _setting(stage, key)) is not None:
        return _changed(setting, before.get(key), after.get(key))
    for name, sources in _OUTPUTS.get(stage, {}).items():
        if key == name:
            source = next(
                (s for s in sources if (records.get(s) or {}).get("output") == now[name]), sources[-1]
            )
            return _made_again(source, records.get(stage), records.get(source))
    return f"{_FILES.get(key, _FILES.get(key.partition('.')[0], key))} changed"


def settings_in(record: Record) -> dict[str, dict[str, Any]]:
    """Return the settings that a record names, by section."""
    sections = {k: dict(v) for k, v in record["inputs"].items() if isinstance(v, dict)}
    return {name: values for name, values in sections.items() if name not in _FILES}


def settings_before(stage: str, records: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of the stages that ``stage`` is made from, by stage, for its record."""
    before = {source for sources in _OUTPUTS.get(stage, {}).values() for source in sources}
    return {name: settings_in(records[name]) for name in sorted(before) if records.get(name)}


def settings_as_made(
    settings: Mapping[str, Any], records: Mapping[str, Record | None], stages: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings with those that the finished ``stages`` were made with, and which that changed."""
    made: dict[str, Any] = json.loads(json.dumps(settings))
    changed: list[str] = []
    for record in (records.get(stage) for stage in stages):
        for section, values in settings_in(record).items() if record and record["done"] else ():
            for key, value in values.items():
                if section in made and made[section].get(key) != value:
                    made[section][key] = value
                    changed.append(f"{section}.{key}")
    return made, changed


def _causes(
    stage: str,
    record: Record,
    records: Mapping[str, Record | None],
    states: Mapping[str, StageState],
    settings: Mapping[str, Any],
) -> Iterator[str]:
    """Yield what makes a finished output stale."""
    for section, values in settings_in(record).items():
        if section not in settings:
            continue
        now = dict(flatten(dict(settings[section])))
        for key, value in flatten(values):
            # What the record has and the settings lack belongs to another kind of draft.
            if key not in now or now[key] != value:
                yield _changed(f"{section}.{key}", value, now.get(key))
    if "seed" in settings and record["inputs"].get("seed", settings["seed"]) != settings["seed"]:
        yield _changed("seed", record["inputs"]["seed"], settings["seed"])
    for name, sources in _OUTPUTS.get(stage, {}).items():
        output = record["inputs"].get(name)
        if output is None:
            continue
        made_by = [s for s in sources if (found := records.get(s)) and found.get("output") == output]
        # An output that was deleted since contradicts nothing: states may go once a draft is trained.
        if not made_by and (source := next((s for s in sources if records.get(s)), None)):
            yield _made_again(source, record, records.get(source))
        for source in made_by:
            if states[source].state != "done":
                yield f"{source} is {states[source].state}"


def _setting(stage: str, key: str) -> str | None:
    """Return the name of the setting that an input is, if it is one."""
    section = key.partition(".")[0]
    if key in _OUTPUTS.get(stage, {}) or key in _FILES or section == "benchmarks":
        return None
    return _SETTINGS.get(key, key)


def _made_again(source: str, record: Record | None, now: Record | None) -> str:
    """Say that the output of ``source`` is another one than ``record`` was made from, and what differs."""
    if now is None or not now["done"]:
        return f"{source} is not finished" if now else f"the output of {source} is missing"
    before = (record or {}).get("before", {}).get(source)
    if before is not None:
        old, new = dict(flatten(before)), dict(flatten(settings_in(now)))
        for key in [*new, *old]:
            if old.get(key) != new.get(key):
                return f"{source} was done again: {_changed(key, old.get(key), new.get(key))}"
    return f"{source} was done again"


def _changed(key: str, old: Any, new: Any) -> str:
    return f"{key} was {_shown(old)} and is {_shown(new)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
