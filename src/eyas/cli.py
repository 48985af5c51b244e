"""The command line: verbs become stages, errors become two lines. Imports nothing heavy before it must."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from eyas import commands
from eyas.config.flags import EXTRACT_FLAGS
from eyas.config.paths import expand_home
from eyas.errors import EyasError, did_you_mean
from eyas.guard import guarded, show_error
from eyas.registry import SERVING_ENGINE

_EXIT_CODES = (
    "Exit codes: 0 done; 1 something failed, and complete work is kept; 2 the command, the settings or the "
    "data are wrong, and nothing was changed; 130 interrupted. After 1 and 130 the same command goes on."
)
# Verb, what it does, an example of its own.
_STAGES = (
    ("run", "Run every stage that is not done yet.", "eyas run -c run.yaml train.num_epochs=2"),
    ("prepare", "Turn conversations into tokenized samples.",
     "eyas prepare -c run.yaml data.max_length=4096"),
    ("regenerate", "Let the target answer the prompts itself.",
     "eyas regenerate -c run.yaml --endpoint http://127.0.0.1:8000/v1"),
    ("extract", "Capture the target's hidden states.", "eyas extract -c run.yaml --engine vllm --tp-size 8"),
    ("train", "Train the draft on the captured states.", "eyas train -c run.yaml train.learning_rate=1e-4"),
    ("export", "Write the folder that vLLM and SGLang load.", "eyas export -c run.yaml --push me/my-draft"),
    ("evaluate", "Measure acceptance by real speculative decoding.",
     "eyas evaluate -c run.yaml evaluate.num_prompts=64"),
)  # fmt: skip

# How the help groups commands; one that is named nowhere comes last.
_SECTIONS = (
    ("Pipeline", ("run", "prepare", "regenerate", "extract", "train", "export", "evaluate")),
    ("Serving", ("serve", "serve-capture")),
    ("Look", ("plan", "status", "logs", "runs", "compare", "inspect")),
    ("Tools", ("init", "doctor", "config", "sweep", "stop", "clean", "completion")),
)
_WHOLE = 1000  # characters of a summary: it is wrapped, not cut


class _UserPath(click.Path):
    """A path in which ``~`` is the home folder: a shell leaves it alone in ``--config=~/run.yaml``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(expand_home(str(value)), param, ctx)
        except EyasError as error:
            self.fail(error.what, param, ctx)


_PATH = _UserPath(path_type=Path)
_NAME_OR_PATH = _UserPath()
_NAME_OR_PATH.name = "text"  # in help texts: it may be a hub id too


class _Engines(click.ParamType):
    """The name of an engine; the known ones are looked up when a command reads its words."""

    name = "engine"

    def __init__(self, names: Callable[[], list[str]]) -> None:
        self.names = names

    def _choice(self) -> click.Choice[str]:
        return click.Choice(self.names())

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        return self._choice().get_metavar(param, ctx)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return self._choice().convert(value, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return self._choice().shell_complete(ctx, param, incomplete)


class _Group(click.Group):
    """Commands in sections, a suggestion for a mistyped one, and one look for all errors."""

    group_class = type

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **named: Any
    ) -> Any:
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **named)
        try:
            code = super().main(args, standalone_mode=False, **named)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.message)
            sys.exit(0)
        except click.UsageError as error:
            what = error.format_message().rstrip(".")
            where = error.ctx.command_path if error.ctx else "eyas"
            show_error(False, what[:1].lower() + what[1:], f"{where} --help")
            sys.exit(error.exit_code)
        except click.Abort:
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = dict(self.commands)
        sections = [(title, [left.pop(name) for name in names if name in left]) for title, names in _SECTIONS]
        for title, found in [*sections, ("Commands", list(left.values()))]:
            if found:
                with formatter.section(title):
                    formatter.write_dl([(str(c.name), c.get_short_help_str(_WHOLE)) for c in found])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            raise click.UsageError(f"unknown command {args[0]!r}{did_you_mean(args[0], self.commands)}", ctx)
        return super().resolve_command(ctx, args)


@click.group("eyas", cls=_Group, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXIT_CODES)
@click.version_option(package_name="eyas", prog_name="eyas")
def cli() -> None:
    """Train draft models for a target LLM and prove that they work."""


def _example(text: str) -> str:
    return f"\b\nExample:\n  {text}"


def _complete_setting(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    from eyas.config.keys import known_keys

    return [f"{key}=" for key in known_keys() if key.startswith(begun)]


def _debug(command: Callable[..., None]) -> Callable[..., None]:
    return click.option("--debug", is_flag=True, help="show a traceback for an error")(command)


def _on_a_run(command: Callable[..., None]) -> Callable[..., None]:
    """Add what every command on a run takes: its file, settings that override it, --debug."""
    command = click.argument(
        "settings", nargs=-1, metavar="[RUN] [SECTION.KEY=VALUE]...", shell_complete=_complete_setting
    )(_debug(command))
    return click.option(
        "-c", "--config", "path", type=_PATH, help="run file (YAML) or run folder  [default: ./run.yaml]"
    )(command)


def _json(command: Callable[..., None]) -> Callable[..., None]:
    return click.option("--json", "as_json", is_flag=True, help="answer as JSON, for a program")(command)


def _add_stage(name: str, summary: str, example: str) -> None:
    text = f"{summary}\n\nSettings come from the run file; SECTION.KEY=VALUE overrides one."

    @cli.command(name, help=text, epilog=_example(example))
    @_on_a_run
    @click.option(
        "--fresh", is_flag=True, help="redo what was written before, instead of refusing or keeping it"
    )
    def command(debug: bool, **arguments: Any) -> None:
        guarded(debug, commands.run_stage, name, **arguments)

    for option in _OPTIONS.get(name, []):
        option(command)


_ENDPOINT = click.option(
    "--endpoint",
    metavar="URL",
    help="running OpenAI-compatible server that answers, e.g. http://127.0.0.1:8000/v1",
)
_STAGE_NAMES = [name for name, _, _ in _STAGES if name != "run"]
_OPTIONS: dict[str, list[Callable[[Any], Any]]] = {
    "run": [
        click.option("--json", "as_json", is_flag=True, help="JSON lines of what happens, on stdout"),
        click.option("--from", "from_stage", type=click.Choice(_STAGE_NAMES),
                     help="do this stage and those after it again, and keep those before"),
        click.option("--detach", is_flag=True, help="work on behind a closed terminal; see eyas status"),
    ],
    "regenerate": [_ENDPOINT],
    "evaluate": [
        _ENDPOINT,
        click.option("--engine", type=_Engines(commands.evaluating_engines),
                     help="an engine that serves: measure the draft there as well, and compare"),
        click.option("--draft", metavar="DRAFT", help="measure this draft without a run: a folder or hub id"),
        click.option("--target", help="with --draft: its target  [default: the one that it names]"),
        click.option("--data", "sources", multiple=True, metavar="SOURCE",
                     help="with --draft: prompts to decode, as in data.sources; may be repeated"),
        click.option("-o", "--output", type=_PATH, help="with --draft: folder of report.json"),
    ],
    "extract": [click.option(flag.name, type=flag.kind, help=flag.help) for flag in reversed(EXTRACT_FLAGS)],
    "export": [
        click.option("--push", metavar="OWNER/NAME", help="also upload the draft to this hub repository"),
        click.option("--dry-run", is_flag=True, help="with --push: say what would be uploaded only"),
        click.option("--private", is_flag=True, help="with --push: make a new repository private"),
    ],
}  # fmt: skip
for _name, _summary, _command in _STAGES:
    _add_stage(_name, _summary, _command)


@cli.command(
    context_settings={"ignore_unknown_options": True},
    epilog=_example("eyas serve runs/my-draft/draft --tp-size 8 --max-model-len 8192"),
)
@click.argument("draft", type=_PATH)
@click.option(
    "--target",
    type=_NAME_OR_PATH,
    help="model folder or hub id  [default: the one the draft was trained for]",
)
@click.option("--engine", type=_Engines(commands.serving_engines), default=SERVING_ENGINE, show_default=True)
@click.option("--print", "print_only", is_flag=True, help="print the engine's command instead of starting it")
@click.option(
    "-k",
    "--num-draft-tokens",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="draft tokens per target forward",
)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--tp-size", type=click.IntRange(1), default=1, show_default=True, help="tensor-parallel GPUs")
@click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="share of a GPU's memory the engine may use",
)
@click.option("--dtype", help="the engine's  [default: the one the draft was trained with]")  # fmt: skip
@click.option("--trust-remote-code", is_flag=True, help="allow code from the target's folder")
@_debug
@click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[ENGINE ARGUMENTS]...")
def serve(debug: bool, **arguments: Any) -> None:
    """Serve a target with its DRAFT folder, after checking that they fit.

    Further arguments go to the engine as they are, e.g. --max-model-len 8192.
    """
    guarded(debug, commands.serve, **arguments)


@cli.command(
    "serve-capture", epilog=_example("eyas serve-capture --model-path /models/M --tp-size 8 --print")
)
@_on_a_run
@click.option("--print", "print_only", is_flag=True, help="show the command, start nothing")
@click.option("--host", default="127.0.0.1", show_default=True, help="address to listen at")
@click.option("--port", default=8000, show_default=True, help="port to listen at")
def serve_capture(debug: bool, **arguments: Any) -> None:
    """Start a vLLM server that captures for eyas extract --endpoint."""
    guarded(debug, commands.serve_capture, **arguments)


for _flag in reversed([flag for flag in EXTRACT_FLAGS if flag.serves]):
    click.option(_flag.name, type=_flag.kind, help=_flag.help)(serve_capture)


@cli.command(epilog=_example("eyas init --target meta-llama/Llama-3.1-8B-Instruct --data c.jsonl --gpus 1"))
@click.option("--target", type=_NAME_OR_PATH, help="model folder, hub id, or demo:smollm2-135m-instruct")
@click.option(
    "--data",
    multiple=True,
    type=_NAME_OR_PATH,
    help="file, folder, glob or hf:owner/name:split; may be repeated",
)
@click.option("--gpus", type=click.IntRange(0), help="GPUs of this machine to use; 0: two CPU cores will do")
@click.option("--run-dir", type=_NAME_OR_PATH, help="folder of the run  [default: runs/NAME]")
@click.option("-o", "--output", type=_PATH, default="run.yaml", show_default=True,
              help="run file to write")  # fmt: skip
@_debug
def init(debug: bool, **arguments: Any) -> None:
    """Write a commented run file; asks on a terminal for what is not given."""
    guarded(debug, commands.init, **arguments)


@cli.command(epilog=_example("eyas plan -c recipes/kimi-k2.5.yaml --rate extract=2280 --json"))
@_on_a_run
@_json
@click.option(
    "--rate",
    "rates",
    multiple=True,
    metavar="STAGE=NUMBER",
    help="known rate instead of a measured one: tokens/s (extract, train, regenerate), rows/s (prepare)",
)
@click.option("--tokens", type=click.IntRange(1), help="tokens of the data, instead of looking at it")
@click.option(
    "--gpu-memory",
    type=click.FloatRange(1),
    metavar="GIB",
    help="memory of each GPU of the machine that is meant, instead of this one's",
)
@click.option("--gpus", type=click.IntRange(1), help="GPUs of the machine that is meant")
@click.option("--calibrate/--no-calibrate", default=None,
              help="measure rates with a short run  [default: for targets up to 2 GiB]")  # fmt: skip
def plan(debug: bool, **arguments: Any) -> None:
    """Say what a run would do: tokens, disk, memory, and the time of each stage with its basis."""
    guarded(debug, commands.plan, **arguments)


@cli.command(epilog=_example("eyas doctor -c run.yaml"))
@_on_a_run
@_json
def doctor(debug: bool, **arguments: Any) -> None:
    """Look for what would stop a run: versions, devices, disk, the target. Exit code 1 for a problem."""
    guarded(debug, commands.doctor, **arguments)


@cli.command(epilog=_example("eyas status -c run.yaml --json"))
@_on_a_run
@_json
def status(debug: bool, **arguments: Any) -> None:
    """Show how far a run is and what works on it."""
    guarded(debug, commands.status, **arguments)


@cli.command(epilog=_example("eyas logs -c run.yaml --follow"))
@_on_a_run
@click.option(
    "-n",
    "--lines",
    "num_lines",
    type=click.IntRange(0),
    default=50,
    show_default=True,
    help="last lines to show; 0: all",
)
@click.option("-f", "--follow", is_flag=True, help="go on until the run ends")  # fmt: skip
def logs(debug: bool, **arguments: Any) -> None:
    """Show the log of a detached run."""
    guarded(debug, commands.logs, **arguments)


@cli.command(epilog=_example("eyas stop -c run.yaml"))
@_on_a_run
def stop(debug: bool, **arguments: Any) -> None:
    """Interrupt the process that works on a run; eyas run goes on where it was."""
    guarded(debug, commands.stop, **arguments)


@cli.command(epilog=_example("eyas compare runs/a runs/b -o compared.html"))
@click.argument("runs", nargs=-1, required=True, type=_PATH, metavar="RUN RUN...")
@click.option("-o", "--output", type=_PATH, help="also write a page with their curves")
@_json
@_debug
def compare(debug: bool, **arguments: Any) -> None:
    """Put finished runs side by side: figures, settings that differ, curves. RUN is a run folder."""
    guarded(debug, commands.compare, **arguments)


@cli.command(epilog=_example("eyas sweep -c run.yaml --vary train.learning_rate=5e-4,1e-3,2e-3"))
@_on_a_run
@click.option("--vary", "varied", multiple=True, required=True, metavar="KEY=VALUE,VALUE,...",
              help="a setting and its values; several make every combination")  # fmt: skip
@_json
def sweep(debug: bool, **arguments: Any) -> None:
    """Run every combination of some settings, and compare them; stages that are the same are shared."""
    guarded(debug, commands.sweep, **arguments)


@cli.command(epilog=_example("eyas runs runs"))
@click.argument("folders", nargs=-1, type=_PATH, metavar="[FOLDER]...")
@_json
@_debug
def runs(debug: bool, **arguments: Any) -> None:
    """List runs: how far each is, its kind of draft, acceptance, age and size. FOLDER is runs by default."""
    guarded(debug, commands.runs, **arguments)


@cli.command(epilog=_example("eyas clean runs/a --yes"))
@click.argument("folders", nargs=-1, required=True, type=_PATH, metavar="RUN...")
@click.option("--yes", is_flag=True, help="delete it; without, only say what would be deleted")
@_debug
def clean(debug: bool, **arguments: Any) -> None:
    """Free states and old checkpoints of runs whose draft is exported; never a draft, report or data."""
    guarded(debug, commands.clean, **arguments)


@cli.group(epilog=_example("eyas inspect prepared -c run.yaml"))
def inspect() -> None:
    """Look at what a stage wrote."""


@inspect.command("prepared", epilog=_example("eyas inspect prepared -c run.yaml -n 5"))
@_on_a_run
@click.option("-n", "--samples", "num_samples", default=3, show_default=True, help="samples to show")
@click.option("--id", "sample_id", help="show this sample")
def inspect_prepared(debug: bool, **arguments: Any) -> None:
    """Show figures of the tokenized data, and samples with what is trained on highlighted."""
    guarded(debug, commands.inspect_prepared, **arguments)


@inspect.command("draft", epilog=_example("eyas inspect draft runs/my-draft"))
@click.argument("name", type=_NAME_OR_PATH, metavar="DRAFT")
@_debug
def inspect_draft(debug: bool, **arguments: Any) -> None:
    """Show what a draft is: kind, format, target, layers, vocabulary. DRAFT: a folder, a run, or a hub id."""
    guarded(debug, commands.inspect_draft, **arguments)


@inspect.command("states", epilog=_example("eyas inspect states -c run.yaml --verify"))
@_on_a_run
@click.option("--verify", is_flag=True, help="only check every shard against its checksum")
def inspect_states(debug: bool, **arguments: Any) -> None:
    """Show figures of the hidden states by layer, and their histograms as a page; or verify every byte."""
    guarded(debug, commands.inspect_states, **arguments)


@cli.command("config", epilog=_example("eyas config -c run.yaml"))
@_on_a_run
@click.option("--keys", is_flag=True, help="list every setting with its meaning")
@click.option("--markdown", is_flag=True, help="print the reference of all settings as a page")
def show_config(debug: bool, **arguments: Any) -> None:
    """Show the resolved configuration, each value with its origin."""
    guarded(debug, commands.show_config, **arguments)


@cli.command(epilog=_example("eyas completion bash >> ~/.bashrc"))
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes commands and settings in your shell."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    script = found(cli, {}, "eyas", "_EYAS_COMPLETE")
    click.echo(
        script.source_template % script.source_vars()
    )  # source() would start the shell to ask its version


def main() -> None:
    cli(prog_name="eyas")
