"""run: every stage in order; what is done already is left alone."""

import shutil
from collections.abc import Callable

from torch.distributed import is_torchelastic_launched

from eyas import registry
from eyas.config.schema import EvaluateSettings
from eyas.errors import UserError
from eyas.files import remove_litter
from eyas.layer_ids import to_sglang
from eyas.locks import hold
from eyas.progress import say
from eyas.stages.context import RunContext
from eyas.stages.evaluate import evaluate
from eyas.stages.export import export
from eyas.stages.extract import extract
from eyas.stages.prepare import prepare
from eyas.stages.regenerate import regenerate
from eyas.stages.report import print_summary, write_report
from eyas.stages.start import read_start
from eyas.stages.train import draft_config, train

STAGE_FUNCTIONS: dict[str, Callable[[RunContext], None]] = {
    "prepare": prepare,
    "regenerate": regenerate,
    "extract": extract,
    "train": train,
    "export": export,
    "evaluate": evaluate,
}


def run(context: RunContext) -> None:
    """Run the whole pipeline and show what came out of it."""
    for name in STAGE_FUNCTIONS:
        if name == "regenerate" and not context.config.regenerate.enabled:
            continue
        run_stage(context, name)
    page = write_report(context)
    print_summary(context)
    say(f"report: {page}")


def run_stage(context: RunContext, name: str) -> None:
    """Run one stage as the run folder's only writer; what it has begun to write when it finds the input
    wrong is taken back."""
    check_settings(context)
    run_dir, folder = context.config.run_dir, context.folder(name)
    new_run, new_stage = not run_dir.exists(), not folder.exists()
    try:
        if is_torchelastic_launched():  # one of several ranks; the command that started them holds the lock
            _run_locked(context, name, new_run, new_stage)
            return
        with hold(run_dir / ".lock", str(run_dir)):
            remove_litter(run_dir)
            _run_locked(context, name, new_run, new_stage)
    finally:
        if new_run and run_dir.is_dir() and not any(run_dir.iterdir()):
            run_dir.rmdir()


def _run_locked(context: RunContext, name: str, new_run: bool, new_stage: bool) -> None:
    try:
        STAGE_FUNCTIONS[name](context)
    except UserError:
        if new_stage:
            shutil.rmtree(context.folder(name), ignore_errors=True)
        if new_run:
            (context.config.run_dir / "run.yaml").unlink(missing_ok=True)
        raise


def check_settings(context: RunContext) -> None:
    """Refuse what a late stage would refuse, before an early one works for hours.

    Raises: UserError for a name that nothing is registered under, aux layers that an engine cannot
    serve, or a draft of an impossible shape or to start from.
    """
    config = context.config
    for table, name, kind in (
        (registry.ENGINES, config.regenerate.engine, "engine"),
        (registry.ENGINES, config.extract.engine, "engine"),
        (registry.DRAFTS, config.draft.architecture, "draft architecture"),
        (registry.EXPORTERS, config.export.format, "export format"),
    ):
        registry.check(table, name, kind)
    _check_evaluation(config.evaluate)
    to_sglang(context.spec.aux_layer_ids)  # one exported folder serves both engines
    read_start(context)
    draft_config(context, config.draft.vocab_size or context.spec.vocab_size)


def _check_evaluation(settings: EvaluateSettings) -> None:
    if settings.engine == "transformers" and not settings.endpoint:
        if not settings.in_process:
            raise UserError(
                "evaluate.in_process is false and no engine is named", hint="set evaluate.engine=vllm"
            )
        served_only = ("benchmarks", "further_draft_tokens")
        if unread := [name for name in served_only if getattr(settings, name)]:
            raise UserError(
                f"evaluate.{unread[0]} is measured in an engine that serves, and none is named",
                hint="set evaluate.engine=vllm, or evaluate.endpoint=URL",
            )
    elif settings.engine == "vllm":
        from eyas.engines.vllm.versions import installed_version

        installed_version()
