"""The report and the card of a run, written anew by each evaluation."""

from eyas.report.card import write_card
from eyas.report.finished_run import FinishedRun
from eyas.report.page import write_report
from eyas.stages.run_context import RunContext, finished_run, report_path


def write_results(context: RunContext) -> FinishedRun:
    """Write report.html, and the card next to the draft; return what they show."""
    finished = finished_run(context)
    write_card(finished, context.folder("export"))
    write_report(finished, report_path(context))
    return finished
