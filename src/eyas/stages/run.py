"""run: every stage in order; what is done already is left alone."""

from collections.abc import Callable

from eyas.progress import say
from eyas.stages.context import RunContext
from eyas.stages.evaluate import evaluate
from eyas.stages.export import export
from eyas.stages.extract import extract
from eyas.stages.prepare import prepare
from eyas.stages.regenerate import regenerate
from eyas.stages.report import print_summary, write_report
from eyas.stages.train import train

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
    for name, stage in STAGE_FUNCTIONS.items():
        if name == "regenerate" and not context.config.regenerate.enabled:
            continue
        stage(context)
    page = write_report(context)
    print_summary(context)
    say(f"report: {page}")
