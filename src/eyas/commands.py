"""What each command does once its arguments are read.

A verb and what it stands on (torch, transformers) take seconds to import. They are imported when a command
runs, after its settings have been read: help, completion and a wrong setting answer at once.
"""

import json
import sys
from pathlib import Path
from typing import Any

import click


def run_stage(name: str, path: Path | None, settings: tuple[str, ...], fresh: bool, **flags: Any) -> None:
    from eyas.config.load import load_config

    if name == "extract":
        from eyas.stages.extract_flags import settings_from_flags

        settings = settings_from_flags(flags, settings)
    else:
        own = ((key, flags.get(key)) for key in ("endpoint", "engine"))
        settings = (*settings, *(f"{name}.{key}={value}" for key, value in own if value))
    if (draft := flags.get("draft")) is not None:
        from eyas.stages.evaluate_draft import evaluate_draft, print_draft

        report = evaluate_draft(draft, flags["target"], flags["sources"], flags["output"], settings)
        print_draft(draft, report)
        return
    if push := flags.get("push"):
        from eyas.stages.publish import check_repository, publish

        check_repository(push)
    loaded = load_config(path, settings)
    from eyas.run_folder import STAGES
    from eyas.stages.check_settings import check_settings
    from eyas.stages.run import run, run_stage
    from eyas.stages.run_context import RunContext

    # Of the stages before it, extract itself only fills prepare's folder: with extract.prepared_data.
    redone = {"run": STAGES, "extract": ("prepare", "extract")}.get(name, (name,)) if fresh else ()
    if first := flags.get("from_stage"):
        redone = STAGES[STAGES.index(first) :]
    context = RunContext(loaded, frozenset(redone))
    if name == "run" and flags["detach"]:
        from eyas.stages.process import detach

        check_settings(context)
        begun = ("--from", first) if first else ()
        words = (*(["--fresh"] if fresh else []), *(["--json"] if flags["as_json"] else []), *begun)
        detach(loaded.config.run_dir, path, words, settings)
    elif name == "run":
        run(context, flags["as_json"])
    else:
        run_stage(context, name)
    if push:
        publish(context, push, flags["dry_run"], flags["private"])


def evaluating_engines() -> list[str]:
    from eyas.engines.checks import evaluates
    from eyas.engines.info import engines_that

    return [info.name for info in engines_that(evaluates)]


def serving_engines() -> list[str]:
    from eyas.engines.info import engines_that

    return [info.name for info in engines_that(lambda info: info.serves)]


def serve(print_only: bool, **options: Any) -> None:
    from eyas.stages.serve import ServeOptions
    from eyas.stages.serve import serve as start

    start(ServeOptions(**options), print_only)


def serve_capture(
    path: Path | None, settings: tuple[str, ...], print_only: bool, host: str, port: int, **flags: Any
) -> None:
    from eyas.config.load import find_run_file, load_config
    from eyas.stages.extract_flags import settings_from_flags

    settings = settings_from_flags(flags, settings)
    if find_run_file(path, settings)[0] is None:  # neither data nor results are meant
        settings = ("run_dir=.", "data.sources=[]", *settings)
    loaded = load_config(path, settings)
    from eyas.stages.run_context import RunContext
    from eyas.stages.serve_capture import serve_capture as start

    start(RunContext(loaded), print_only=print_only, host=host, port=port)


def plan(path: Path | None, settings: tuple[str, ...], as_json: bool, **arguments: Any) -> None:
    from eyas.config.load import load_config

    loaded = load_config(path, settings)
    from eyas.plan.summary import print_plan
    from eyas.stages.plan import plan as make_plan
    from eyas.stages.run_context import RunContext

    found = make_plan(RunContext(loaded), **arguments)
    click.echo(json.dumps(found.to_json(), indent=2)) if as_json else print_plan(found)


def doctor(path: Path | None, settings: tuple[str, ...], as_json: bool) -> None:
    from eyas.config.load import find_run_file, load_config
    from eyas.stages.doctor import examine, print_findings

    loaded = load_config(path, settings) if settings or find_run_file(path)[0] else None
    findings = examine(loaded)
    click.echo(json.dumps([f.__dict__ for f in findings], indent=2)) if as_json else print_findings(findings)
    if any(f.state == "problem" for f in findings):
        sys.exit(1)


def status(path: Path | None, settings: tuple[str, ...], as_json: bool) -> None:
    from eyas.config.load import load_config
    from eyas.stages.process import print_status
    from eyas.stages.process import status as look

    loaded = load_config(path, settings)
    found = look(loaded.config.run_dir, loaded.recorded)
    click.echo(json.dumps(found, indent=2)) if as_json else print_status(found)


def logs(path: Path | None, settings: tuple[str, ...], num_lines: int, follow: bool) -> None:
    from eyas.stages.process import follow as lines_of

    for line in lines_of(run_dir(path, settings), num_lines, follow):
        click.echo(line, nl=False)


def stop(path: Path | None, settings: tuple[str, ...]) -> None:
    from eyas.stages.process import stop as interrupt

    click.echo(interrupt(run_dir(path, settings)))


def run_dir(path: Path | None, settings: tuple[str, ...]) -> Path:
    from eyas.config.load import load_config

    return load_config(path, settings).config.run_dir


def compare(runs: tuple[Path, ...], output: Path | None, as_json: bool) -> None:
    from eyas.stages.compare import compare as read
    from eyas.stages.compare import print_comparison, write_comparison

    found = read(runs)
    click.echo(json.dumps(found.to_json(), indent=2)) if as_json else print_comparison(found)
    if output:
        write_comparison(found, output)


def inspect_prepared(
    path: Path | None, settings: tuple[str, ...], num_samples: int, sample_id: str | None
) -> None:
    from eyas.config.load import load_config

    loaded = load_config(path, settings)
    from eyas.stages.inspect import inspect_prepared as look
    from eyas.stages.run_context import RunContext

    look(RunContext(loaded), num_samples, sample_id)


def show_config(path: Path | None, settings: tuple[str, ...], keys: bool, markdown: bool) -> None:
    from eyas.config.explain import describe_keys, to_commented_yaml, to_markdown
    from eyas.config.load import load_config

    if markdown:
        click.echo(to_markdown(), nl=False)
    elif keys:
        rows = describe_keys()
        width = max(len(key) for key, _ in rows)
        for key, meaning in rows:
            click.echo(f"{key:<{width}}  {meaning}")
    else:
        click.echo(to_commented_yaml(load_config(path, settings)), nl=False)


def init(**arguments: Any) -> None:
    from eyas.stages.init import init as write_run_file

    write_run_file(**arguments)


def inspect_states(path: Path | None, settings: tuple[str, ...], verify: bool) -> None:
    from eyas.config.load import load_config

    loaded = load_config(path, settings)
    from eyas.stages import inspect_states as states
    from eyas.stages.run_context import RunContext

    show = states.verify_states if verify else states.inspect_states
    show(RunContext(loaded))


def sweep(path: Path | None, settings: tuple[str, ...], varied: tuple[str, ...], as_json: bool) -> None:
    from eyas.stages.compare import print_comparison
    from eyas.stages.sweep import sweep as run_all

    found = run_all(path, settings, varied)
    click.echo(json.dumps(found.to_json(), indent=2)) if as_json else print_comparison(found)


def runs(folders: tuple[Path, ...], as_json: bool) -> None:
    from eyas.stages.runs import list_runs, print_runs, to_json

    found = list_runs(folders or (Path("runs"),))
    click.echo(json.dumps(to_json(found), indent=2)) if as_json else print_runs(found)


def clean(folders: tuple[Path, ...], yes: bool) -> None:
    from eyas.progress_displays import size
    from eyas.stages.clean import clean as free
    from eyas.stages.clean import freed_by, waiting_for_states

    for folder in folders:
        freed = free(folder) if yes else freed_by(folder)
        for one in freed:
            click.echo(f"{size(one.num_bytes):>10}  {one.path}  ({one.what})")
        total = size(sum(one.num_bytes for one in freed))
        click.echo(f"{folder}: {total} {'freed' if yes else 'would be freed; delete it with --yes'}")
        for user in waiting_for_states(folder):
            click.echo(f"{folder}: states kept for {user}, which took them and has no draft yet")


def inspect_draft(name: str) -> None:
    from eyas.stages.inspect_draft import inspect_draft as look

    rows = list(look(name))
    width = max(len(title) for title, _ in rows)
    for title, value in rows:
        click.echo(f"{title:<{width}}  {value}")
