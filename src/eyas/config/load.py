"""A run file and ``section.key=value`` overrides become one checked configuration."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from eyas.config.keys import known_keys
from eyas.config.paths import expand_paths, paths_from, paths_to
from eyas.config.schema import DraftSettings, RunConfig
from eyas.config.secrets import refuse_secrets
from eyas.errors import UserError, did_you_mean

# Dates that are none, and nesting without end, come as Python's own errors.
_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError, OverflowError)
_MOST_VALUES = 10_000
RUN_FILE = "run.yaml"
OWN_FOLDER = "."  # run_dir in the run.yaml that a run folder holds

# Settings that had another name before 0.2.
RENAMED = {
    "data.held_out_share": "data.validation_fraction",
    "train.average_decay": "train.ema_decay",
    "train.loss": "draft.loss",
    "train.micro_batches": "train.batches_per_step",
    "train.num_unroll_steps": "draft.ttt_steps",
    "train.step_decay": "draft.ttt_step_loss_decay",
    "evaluate.further_draft_tokens": "evaluate.sweep_draft_tokens",
}
# Values that had another name before 0.2.
RENAMED_VALUES = {("export.format", "vllm"): "native"}

# "the run": what a finished stage of the run was made with.
Origin = Literal["file", "command line", "default", "the run"]


@dataclass(frozen=True)
class LoadedConfig:
    """The configuration, where each value came from, by dotted key, and the arguments that give it again."""

    config: RunConfig
    origins: dict[str, Origin]
    arguments: tuple[str, ...] = ()

    @property
    def recorded(self) -> dict[str, Any]:
        """The settings as a run's records hold them: nested, relative paths from the run folder."""
        values = self.config.model_dump(mode="json")
        paths_to(self.config.run_dir, values)
        return values


def load_config(path: Path | None, overrides: tuple[str, ...] = ()) -> LoadedConfig:
    """Read ``path``, apply ``overrides`` in order, check everything.

    Relative paths in a run file start at its folder, those of ``overrides`` at the current one.
    Raises: UserError naming the key, with the closest known one for an unknown key.
    """
    path, overrides = find_run_file(path, overrides)
    values: dict[str, Any] = read_settings(path) if path else {}
    origins: dict[str, Origin] = {key: "file" for key, _ in flatten(values)}
    for override in overrides:
        key, value = _parse_override(override)
        _set(values, key, value)
        origins[key] = "command line"
    architecture = _architecture(values)
    known = known_keys(architecture)
    sections = {key.rpartition(".")[0] for key in known}
    for key, value in flatten(values):
        if key in RENAMED:
            raise UserError(f"{key} was renamed to {RENAMED[key]}", hint=f"write {RENAMED[key]} instead")
        if isinstance(value, str) and (new := RENAMED_VALUES.get((key, value))):
            raise UserError(f"{key}={value} was renamed to {new}", hint=f"write {key}={new} instead")
        # Some settings are mappings; their keys are anybody's.
        if key not in sections and not any(key == k or key.startswith(f"{k}.") for k in known):
            raise _unknown(key, architecture)
    refuse_secrets(flatten(values))
    expand_paths(values)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise _explain(error) from None
    for key, _ in flatten(config.model_dump(mode="json")):
        origins.setdefault(key, "default")
    file = ("-c", str(path)) if path else ()
    return LoadedConfig(config, origins, (*file, *overrides))


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings that a run file holds, nested, its relative paths made relative to here.

    Raises: UserError for a file that is none.
    """
    values = _read(path)
    in_run_folder = _is_in_run_folder(path)
    # Version 0.1 wrote a run's own file with paths from where its command was run.
    if not in_run_folder or values.get("run_dir") == OWN_FOLDER:
        paths_from(path.parent, values)
    if in_run_folder:
        values["run_dir"] = str(path.parent)  # wherever the folder has been moved to
    return values


def find_run_file(path: Path | None, words: tuple[str, ...] = ()) -> tuple[Path | None, tuple[str, ...]]:
    """Return the run file that a command means, and its words without a run folder.

    A folder, after ``-c`` or among the words, stands for the run.yaml in it. Where neither a file nor a
    target is named, it is ./run.yaml, if that exists.
    """
    folders = [word for word in words if "=" not in word and os.path.isdir(word)]
    if path is None and len(folders) == 1:
        path, words = Path(folders[0]), tuple(word for word in words if word != folders[0])
    if path is not None:
        return (path / RUN_FILE if path.is_dir() else path), words
    found = Path(RUN_FILE)
    is_meant = found.is_file() and not any(word.startswith("target.model=") for word in words)
    return (found if is_meant else None), words


def _is_in_run_folder(path: Path) -> bool:
    """Whether a run file is the resolved one of a run: every run has prepared data."""
    return path.name == RUN_FILE and (path.parent / "prepared" / "stage.json").is_file()


def flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of nested settings as (dotted key, value)."""
    leaves: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            leaves += flatten(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot read the run file {path}: {error.strerror}",
            hint="name one with -c, for example -c recipes/smollm2-cpu.yaml",
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"the run file {path} is not UTF-8 text", hint="-c names a YAML file") from None
    try:
        values = yaml.safe_load(text)
    except _NOT_YAML as error:
        raise UserError(
            f"{path} is not valid YAML: {' '.join(str(error).split())}", hint="mend the file at that line"
        ) from None
    if not isinstance(values, dict) or _is_vast(values):
        raise UserError(f"{path} does not hold settings", hint="it should start with 'target:' and 'data:'")
    return values


def _is_vast(values: dict[str, Any]) -> bool:
    """Whether aliases make a short file hold more than anybody writes, or itself."""
    waiting: list[Any] = [values]
    for _ in range(_MOST_VALUES):
        if not waiting:
            return False
        value = waiting.pop()
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return True


def _parse_override(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"cannot read {override!r}", hint="write section.key=value, e.g. train.num_epochs=2")
    try:
        # YAML 1.1 reads "1e-4" as a string; a person means the number.
        return key, float(text) if _is_exponent(text) else yaml.safe_load(text)
    except _NOT_YAML:
        raise UserError(
            f"cannot read the value of {override!r}", hint="write it as in YAML; quote it for the shell"
        ) from None


def _is_exponent(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "e" in text.lower()


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, leaf = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise _unknown(key, None)
    values[leaf] = value


def _architecture(values: dict[str, Any]) -> str:
    """Return the kind of draft that the settings name, or the default for what is no name."""
    draft = values.get("draft")
    named = draft.get("architecture") if isinstance(draft, dict) else None
    return named if isinstance(named, str) else DraftSettings().architecture


def _unknown(key: str, architecture: str | None) -> UserError:
    keys = known_keys(architecture)
    if architecture is not None and key in known_keys():
        return UserError(
            f"{key} is not a setting of draft.architecture={architecture}",
            hint="eyas config --markdown lists the settings of each kind of draft",
        )
    suggestion = did_you_mean(key, keys)
    if not suggestion:
        by_leaf = {k.rpartition(".")[2]: k for k in keys}
        leaf = key.rpartition(".")[2]
        suggestion = f"; did you mean {by_leaf[leaf]!r}?" if leaf in by_leaf else ""
    return UserError(f"unknown setting {key!r}{suggestion}", hint="eyas config --keys lists every setting")


def _explain(error: ValidationError) -> UserError:
    first = error.errors()[0]
    # For a value of a tuple or union the location ends in an index; the setting is what people know.
    key = ".".join(str(part) for part in first["loc"] if not isinstance(part, int))
    if first["type"] == "missing":
        return UserError(f"the setting {key!r} is missing", hint=f"set {key}=... or write it in the run file")
    return UserError(f"{key}: {first['msg']} (got {first['input']!r})", hint="eyas config --keys explains it")
