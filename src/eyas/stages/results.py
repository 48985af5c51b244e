"""The report and the card of a run, written anew by each evaluation; the card by an export too."""

from eyas.report.card import write_card
from eyas.report.finished_run import FinishedRun
from eyas.report.page import write_report
from eyas.stages.run_context import RunContext, finished_run, report_path


def write_results(context: RunContext) -> FinishedRun:
    """Write report.html, and the card next to the draft; return what they show."""
    finished = write_current_card(context)
    write_report(finished, report_path(context))
    return finished


def write_current_card(context: RunContext) -> FinishedRun:
    """Write the card of what the run holds now next to the draft; return what it shows."""
    finished = finished_run(context)
    write_card(finished, context.folder("export"))
    return finished
