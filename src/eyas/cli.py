"""The command line: verbs become stages, errors become two lines. Imports nothing heavy before it must."""

import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import click

import eyas
from eyas.config.flags import EXTRACT_FLAGS
from eyas.errors import EyasError, did_you_mean

_VERBS = {
    "run": "Run every stage that is not done yet.",
    "prepare": "Turn conversations into tokenized samples.",
    "regenerate": "Let the target answer the prompts itself.",
    "extract": "Capture the target's hidden states.",
    "train": "Train the draft on the captured states.",
    "export": "Write the folder that vLLM and SGLang load.",
    "evaluate": "Measure acceptance by real speculative decoding.",
}


class _Group(click.Group):
    """Commands in the order of the pipeline, and a suggestion for a mistyped one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            raise click.UsageError(f"unknown command {args[0]!r}{did_you_mean(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(eyas.__version__, prog_name="eyas")
def cli() -> None:
    """Train EAGLE-3 draft models for a target LLM and prove that they work."""


def _add_stage(name: str, summary: str) -> None:
    @cli.command(name, help=f"{summary}\n\nSettings come from the run file; SECTION.KEY=VALUE overrides one.")
    @click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="run file (YAML)")
    @click.option(
        "--fresh", is_flag=True, help="redo what was written before, instead of refusing or keeping it"
    )
    @click.option("--debug", is_flag=True, help="show a traceback for an error")
    @click.argument("settings", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
    def command(
        path: Path | None,
        fresh: bool,
        debug: bool,
        settings: tuple[str, ...],
        **flags: Any,
    ) -> None:
        if name in ("regenerate", "evaluate") and (endpoint := flags.pop("endpoint")):
            settings = (*settings, f"{name}.endpoint={endpoint}")
        if name == "evaluate" and (engine := flags.pop("engine")):
            settings = (*settings, f"evaluate.engine={engine}")
        _guarded(debug, _run_stage, name, path, fresh, settings, flags)

    if name in ("regenerate", "evaluate"):
        _ENDPOINT(command)
    if name == "evaluate":
        _ENGINE(command)
    for flag in reversed(EXTRACT_FLAGS if name == "extract" else ()):
        click.option(flag.name, type=flag.kind, help=flag.help)(command)


_ENDPOINT = click.option(
    "--endpoint",
    metavar="URL",
    help="running OpenAI-compatible server that answers, e.g. http://127.0.0.1:8000/v1",
)
_ENGINE = click.option(
    "--engine",
    type=click.Choice(["transformers", "vllm"]),
    help="vllm: measure the draft there as well, and compare",
)
for _name, _summary in _VERBS.items():
    _add_stage(_name, _summary)


@cli.command("serve", context_settings={"ignore_unknown_options": True})
@click.argument("draft", type=click.Path(path_type=Path))
@click.option("--target", help="model folder or hub id  [default: the one the draft was trained for]")
@click.option("--engine", type=click.Choice(["vllm", "sglang"]), default="vllm", show_default=True)
@click.option("--print", "print_only", is_flag=True, help="print the engine's command instead of starting it")
@click.option("-k", "--num-draft-tokens", type=click.IntRange(1), default=3, show_default=True,
              help="draft tokens per target forward")  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--tp-size", type=click.IntRange(1), default=1, show_default=True, help="tensor-parallel GPUs")
@click.option("--gpu-memory-utilization", type=click.FloatRange(0, 1, min_open=True), default=0.9,
              show_default=True, help="share of a GPU's memory the engine may use")  # fmt: skip
@click.option("--dtype", help="the engine's  [default: the one the draft was trained with]")
@click.option("--debug", is_flag=True, help="show a traceback for an error")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[ENGINE ARGUMENTS]...")
def serve(debug: bool, print_only: bool, **options: Any) -> None:
    """Serve a target with its DRAFT folder in vLLM, after checking that they fit.

    Further arguments go to the engine as they are, e.g. --max-model-len 8192.
    """
    _guarded(debug, _serve, print_only, options)


@cli.command("serve-capture")
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="run file (YAML)")
@click.option("--print", "print_only", is_flag=True, help="show the command, start nothing")
@click.option("--host", default="127.0.0.1", show_default=True, help="address to listen at")
@click.option("--port", default=8000, show_default=True, help="port to listen at")
@click.option("--debug", is_flag=True, help="show a traceback for an error")
@click.argument("settings", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
def serve_capture(path: Path | None, debug: bool, settings: tuple[str, ...], **options: Any) -> None:
    """Start a vLLM server that captures for eyas extract --endpoint."""
    _guarded(debug, _serve_capture, path, settings, options)


for _flag in reversed([flag for flag in EXTRACT_FLAGS if flag.serves]):
    click.option(_flag.name, type=_flag.kind, help=_flag.help)(serve_capture)


@cli.group()
def inspect() -> None:
    """Look at what a stage wrote."""


@inspect.command("prepared")
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="run file (YAML)")
@click.option("-n", "--samples", "num_samples", default=3, show_default=True, help="samples to show")
@click.option("--id", "sample_id", help="show this sample")
@click.option("--debug", is_flag=True, help="show a traceback for an error")
@click.argument("settings", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
def inspect_prepared(
    path: Path | None, num_samples: int, sample_id: str | None, debug: bool, settings: tuple[str, ...]
) -> None:
    """Show figures of the tokenized data, and samples with what is trained on highlighted."""
    _guarded(debug, _inspect_prepared, path, num_samples, sample_id, settings)


@inspect.command("states")
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="run file (YAML)")
@click.option("--verify", is_flag=True, help="only check every shard against its checksum")
@click.option("--debug", is_flag=True, help="show a traceback for an error")
@click.argument("settings", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
def inspect_states(path: Path | None, verify: bool, debug: bool, settings: tuple[str, ...]) -> None:
    """Show figures of the hidden states by layer, and their histograms as a page; or verify every byte."""
    _guarded(debug, _inspect_states, path, verify, settings)


@cli.command("config")
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="run file (YAML)")
@click.option("--keys", is_flag=True, help="list every setting with its meaning")
@click.option("--debug", is_flag=True, help="show a traceback for an error")
@click.argument("settings", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
def show_config(path: Path | None, keys: bool, debug: bool, settings: tuple[str, ...]) -> None:
    """Show the resolved configuration, each value with its origin."""
    _guarded(debug, _show_config, path, keys, settings)


def _run_stage(
    name: str, path: Path | None, fresh: bool, settings: tuple[str, ...], flags: dict[str, Any]
) -> None:
    from eyas.config.load import load_config

    if flags:
        from eyas.stages.extract_flags import settings_from_flags

        settings = settings_from_flags(flags, settings)
    loaded = load_config(path, settings)
    from eyas.stages.context import RunContext
    from eyas.stages.run import run, run_stage

    context = RunContext(loaded, fresh)
    run(context) if name == "run" else run_stage(context, name)


def _serve(print_only: bool, options: dict[str, Any]) -> None:
    from eyas.stages.serve import ServeOptions, serve

    serve(ServeOptions(**options), print_only)


def _serve_capture(path: Path | None, settings: tuple[str, ...], options: dict[str, Any]) -> None:
    from eyas.config.load import load_config
    from eyas.stages.extract_flags import settings_from_flags

    own = {name: options.pop(name) for name in ("print_only", "host", "port")}
    settings = settings_from_flags(options, settings)
    if path is None:  # neither data nor results are meant
        settings = ("run_dir=.", "data.sources=[]", *settings)
    loaded = load_config(path, settings)
    from eyas.stages.context import RunContext
    from eyas.stages.serve_capture import serve_capture

    serve_capture(RunContext(loaded), **own)


def _inspect_prepared(
    path: Path | None, num_samples: int, sample_id: str | None, settings: tuple[str, ...]
) -> None:
    from eyas.config.load import load_config

    loaded = load_config(path, settings)
    from eyas.stages.context import RunContext
    from eyas.stages.inspect import inspect_prepared

    inspect_prepared(RunContext(loaded), num_samples, sample_id)


def _inspect_states(path: Path | None, verify: bool, settings: tuple[str, ...]) -> None:
    from eyas.config.load import load_config

    loaded = load_config(path, settings)
    from eyas.stages import inspect_states
    from eyas.stages.context import RunContext

    show = inspect_states.verify_states if verify else inspect_states.inspect_states
    show(RunContext(loaded))


def _show_config(path: Path | None, keys: bool, settings: tuple[str, ...]) -> None:
    from eyas.config.explain import describe_keys, to_commented_yaml
    from eyas.config.load import load_config

    if keys:
        rows = describe_keys()
        width = max(len(key) for key, _ in rows)
        for key, meaning in rows:
            click.echo(f"{key:<{width}}  {meaning}")
    else:
        click.echo(to_commented_yaml(load_config(path, settings)), nl=False)


def _guarded(debug: bool, function: Any, *arguments: Any) -> None:
    """Run a command; show an error as what and hint, and exit with its code."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        function(*arguments)
    except EyasError as error:
        if debug:
            traceback.print_exc()
        click.echo(f"error: {error.what}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt as error:
        click.echo("interrupted; the same command goes on from here", err=True)
        sys.exit(128 + (signal.SIGTERM if error.args else signal.SIGINT))
    except OSError as error:
        if debug:
            traceback.print_exc()
        click.echo(f"error: {error}", err=True)
        click.echo("hint: complete work is kept; mend the cause and run the same command again", err=True)
        sys.exit(1)
    except Exception as error:
        if debug:
            traceback.print_exc()
        said = f": {' '.join(str(error).split())}" if str(error) else ""
        click.echo(f"error: {type(error).__name__}{said}", err=True)
        click.echo("hint: this should not happen; please report what the command says with --debug", err=True)
        sys.exit(1)
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> None:
    """End a terminated command as an interrupted one: engines are closed and half-written files removed."""
    raise KeyboardInterrupt("terminated")


def main() -> None:
    cli()
