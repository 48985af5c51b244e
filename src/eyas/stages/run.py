"""run: every stage in order; what is done already is left alone."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from torch.distributed import is_torchelastic_launched

from eyas.engines.checks import shares_start
from eyas.errors import UserError
from eyas.files import absent_folders, remove_empty, remove_folder, remove_litter
from eyas.locks import hold
from eyas.progress import Screen, current_screen, on_screen, say
from eyas.progress_displays import JsonLines, StatusFile
from eyas.progress_terminal import Checklist, Terminal
from eyas.report.page import print_summary
from eyas.run_folder import FOLDERS, STAGES, put_in_place, redo_folder
from eyas.run_process import kept_files, progress_path, recorded, restore_files
from eyas.stages.check_settings import check_settings
from eyas.stages.evaluate import evaluate
from eyas.stages.export import export
from eyas.stages.extract import extract
from eyas.stages.prepare import prepare
from eyas.stages.regenerate import regenerate
from eyas.stages.run_context import RunContext, facts_of, finished_run, interrupted, num_held_out, report_path
from eyas.stages.train import train
from eyas.train.validation import check_held_out

STAGE_FUNCTIONS: dict[str, Callable[[RunContext], None]] = {
    "prepare": prepare,
    "regenerate": regenerate,
    "extract": extract,
    "train": train,
    "export": export,
    "evaluate": evaluate,
}


def stages_of(context: RunContext) -> list[str]:
    """Return the stages of this run in order; extract itself takes in ``extract.prepared_data``."""
    left_out = set() if context.config.regenerate.enabled else {"regenerate"}
    if context.config.extract.prepared_data is not None:
        left_out |= {"prepare", "regenerate"}
    return [stage for stage in STAGE_FUNCTIONS if stage not in left_out]


# What ``run`` does again without being asked when its settings have changed: it costs no work of the target.
DONE_AGAIN = frozenset({"train", "export", "evaluate"})


def run(context: RunContext, as_json: bool = False, summary: bool = True) -> None:
    """Run the whole pipeline and show what came out of it; with ``as_json`` as JSON lines on stdout."""
    context.may_differ, context.in_whole_run = DONE_AGAIN, True
    run_dir, stages = context.config.run_dir, stages_of(context)
    absent, before = absent_folders(run_dir), kept_files(run_dir)
    try:
        with (
            recorded(run_dir),
            _screen(as_json, stages) as screen,
            on_screen(StatusFile(screen, progress_path(run_dir))),
        ):
            check_held_out(context.config.data.validation_fraction)
            check_settings(context, stages)
            with closing(context.owner):
                for name in stages:
                    context.owner.keep(shares_start(context.config, name))
                    _run_shown(context, name)
                    if name in ("prepare", "extract"):
                        check_held_out(num_held_out(context))
            finished, page = finished_run(context), report_path(context)
    except UserError:
        if not context.began:  # refused at its start: nothing has changed
            restore_files(run_dir, before)
            remove_empty(absent)
        raise
    if as_json:
        JsonLines().event("result", report=finished.evaluation, page=str(page))
    else:
        if summary:
            print_summary(finished)
        served = f"{context.folder('export')} -k {context.config.evaluate.num_draft_tokens}"
        say(f"report: {page}\nnext: eyas serve {served}")


@contextmanager
def _screen(as_json: bool, stages: list[str]) -> Iterator[Screen]:
    if as_json:
        yield JsonLines()
    elif isinstance(current_screen(), Terminal):
        with Checklist(stages) as checklist:
            yield checklist
    else:
        yield current_screen()


def _run_shown(context: RunContext, name: str) -> None:
    """Run one stage and let the screen know how it goes."""
    screen, started, state = current_screen(), time.monotonic(), "failed"
    before = None if name in context.fresh else facts_of(context, name)
    screen.stage(name, "running")
    try:
        run_stage(context, name)
        state = "kept" if facts_of(context, name) == before else "done"
    finally:
        screen.stage(name, state, time.monotonic() - started)


def run_stage(context: RunContext, name: str) -> None:
    """Run one stage as the run folder's only writer; what a refused one has begun to write is taken back."""
    check_settings(context, [name])
    run_dir = context.config.run_dir
    new_run, absent = not (run_dir / "run.yaml").exists(), absent_folders(run_dir)
    try:
        if is_torchelastic_launched():  # one of several ranks; the command that started them holds the lock
            _run_locked(context, name, new_run)
            return
        with hold(run_dir / ".lock", str(run_dir)):
            remove_litter(run_dir)
            for stage in FOLDERS.values():
                put_in_place(run_dir / stage)
            _run_locked(context, name, new_run)
    finally:
        remove_empty(absent)


def _take_earlier_stages(context: RunContext, name: str) -> None:
    """Let the stages before one take what ``base_run`` has of them, as ``run`` does when it comes to them."""
    if context.config.base_run is not None:
        for earlier in stages_of(context):
            if STAGES.index(earlier) < STAGES.index(name) and not facts_of(context, earlier):
                context.only_taken = earlier
                STAGE_FUNCTIONS[earlier](context)


def _run_locked(context: RunContext, name: str, new_run: bool) -> None:
    main = context.config.run_dir / FOLDERS[name]
    existed = {folder for folder in (main, redo_folder(main)) if folder.exists()}
    try:
        _take_earlier_stages(context, name)
        STAGE_FUNCTIONS[name](context)
    except BaseException as error:
        interrupted(context, name)
        if not isinstance(error, UserError):
            raise
        if (folder := context.folder(name)) not in existed:
            with suppress(OSError):
                remove_folder(folder)
        if new_run:
            (context.config.run_dir / "run.yaml").unlink(missing_ok=True)
        raise
