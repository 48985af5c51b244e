"""sweep: one run for each combination of some settings; they share the stages that do not depend on these."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from eyas.config.load import LoadedConfig, load_config
from eyas.errors import UserError
from eyas.progress import say
from eyas.stages.check_settings import check_settings
from eyas.stages.compare import Comparison, compare
from eyas.stages.run import run
from eyas.stages.run_context import RunContext


def sweep(path: Path | None, settings: tuple[str, ...], varied: Sequence[str]) -> Comparison:
    """Run each combination of ``varied`` (KEY=VALUE,VALUE,...) and return all of them side by side.

    The first run takes what it can from the run file's own run, and the others from the first. All settings
    are checked before the first run starts; the same command resumes an interrupted sweep.
    Raises: UserError where a setting is wrong or names no values.
    """
    points = list(_points(path, settings, varied))
    for loaded in points:
        # The first run, which others take stages from, does not exist yet.
        alone = loaded.config.model_copy(update={"base_run": None})
        check_settings(RunContext(replace(loaded, config=alone)))
    folders = [loaded.config.run_dir for loaded in points]
    for number, loaded in enumerate(points, 1):
        say(f"sweep: run {number} of {len(points)}, {loaded.config.run_dir}")
        run(RunContext(loaded), summary=False)
    return compare(folders)


def _points(path: Path | None, settings: tuple[str, ...], varied: Sequence[str]) -> Iterator[LoadedConfig]:
    """Yield the configuration of each combination, with a folder named after its values."""
    main = load_config(path, settings).config
    axes = [_values(word) for word in varied]
    base = main.base_run or (main.run_dir if (main.run_dir / "run.yaml").is_file() else None)
    for overrides in itertools.product(*axes):
        folder = main.run_dir.with_name(f"{main.run_dir.name}-{_as_name(overrides)}")
        shared = (f"base_run={base}",) if base is not None else ()
        yield load_config(path, (*settings, *overrides, f"run_dir={folder}", *shared))
        base = base or folder


def _as_name(overrides: Sequence[str]) -> str:
    """Return a part of a folder's name: the last word of each key, and its value."""
    named = []
    for word in overrides:
        key, _, value = word.partition("=")
        kept = "".join(c if c.isalnum() or c in ".-" else "_" for c in value)
        named.append(f"{key.rpartition('.')[2]}={kept}")
    return ",".join(named)


def _values(word: str) -> list[str]:
    key, equals, text = word.partition("=")
    values = [value for value in text.split(",") if value]
    if not equals or not values:
        raise UserError(
            f"--vary {word}: names no values", hint="as in --vary train.learning_rate=5e-4,1e-3,2e-3"
        )
    return [f"{key}={value}" for value in values]
