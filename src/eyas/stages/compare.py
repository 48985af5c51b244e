"""compare: finished runs side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.config.load import flatten
from eyas.progress import say
from eyas.progress_displays import duration
from eyas.provenance import settings_as_made, stage_states
from eyas.report.difference import difference_text
from eyas.report.pages import write_page
from eyas.report.serving_section import identical_of
from eyas.run_folder import STAGES, check_is_run, records_of, settings_of

Records = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """``figures`` and ``differing`` settings as (name, a value for each run); "–" where a run has none."""

    runs: list[str]
    figures: list[tuple[str, list[str]]]
    differing: list[tuple[str, list[str]]]
    records: list[Records]

    def to_json(self) -> dict[str, Any]:
        return {"runs": self.runs, "figures": dict(self.figures), "settings": dict(self.differing)}


def compare(folders: Sequence[Path]) -> Comparison:
    """Read what the runs recorded; of stale stages, the cause alone.

    Raises: UserError for a folder that is no run.
    """
    records: list[Records] = []
    settings: list[dict[str, Any]] = []
    stale: list[dict[str, str]] = []
    for folder in folders:
        check_is_run(folder)
        found, values = records_of(folder), settings_of(folder)
        states = stage_states(found, values)
        stale.append({stage: state.cause for stage, state in states.items() if state.cause})
        current = {
            stage: record for stage, record in found.items() if record and states[stage].state == "done"
        }
        records.append(current)
        settings.append(dict(flatten(settings_as_made(values, current, STAGES)[0])))
    columns = [_figures(r) | _stale(causes) for r, causes in zip(records, stale, strict=True)]
    for column, record in zip(columns[1:], records[1:], strict=True):
        if "evaluate" in records[0] and "evaluate" in record:
            apart = difference_text(records[0]["evaluate"]["report"], record["evaluate"]["report"])
            column |= {"acceptance length, less the first run's": apart} if apart else {}
    names = list(dict.fromkeys(name for column in columns for name in column))
    keys = sorted(set().union(*settings) - {"run_dir"})
    rows = [(key, [str(s.get(key, "–")) for s in settings]) for key in keys]
    return Comparison(
        runs=[str(folder) for folder in folders],
        figures=[(name, [column.get(name, "–") for column in columns]) for name in names],
        differing=[(key, row) for key, row in rows if len(set(row)) > 1],
        records=records,
    )


def print_comparison(found: Comparison) -> None:
    """Print figures, then the settings that differ, on stdout."""
    rows = [("", found.runs), *found.figures]
    if found.differing:
        rows += [
            ("", [""] * len(found.runs)),
            ("settings that differ", [""] * len(found.runs)),
            *found.differing,
        ]
    widths = [max(len(name) for name, _ in rows)]
    widths += [max(len(row[i]) for _, row in rows) for i in range(len(found.runs))]
    for name, row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip((name, *row), widths, strict=True))
        print("  ".join(cells).rstrip())


def write_comparison(found: Comparison, path: Path) -> None:
    """Write a page with the runs' curves over each other."""
    loss = {run: _losses(r) for run, r in zip(found.runs, found.records, strict=True) if "train" in r}
    lengths = {
        run: [(x["step"], x["acceptance_length"]) for x in r["train"]["history"] if x.get("validation")]
        for run, r in zip(found.runs, found.records, strict=True)
        if "train" in r
    }
    write_page(
        path,
        "compare.html.j2",
        title="Runs compared",
        header=("", *found.runs),
        figures=[(name, *row) for name, row in found.figures],
        differing=[(key, *row) for key, row in found.differing],
        loss=loss,
        lengths=lengths,
    )
    say(f"compare: wrote {path}")


def _figures(records: Records) -> dict[str, str]:
    """Return the figures of the stages that are done."""
    found: dict[str, str] = {}
    if "evaluate" in records:
        report = records["evaluate"]["report"]
        found |= {
            "acceptance length, decoded": f"{report['acceptance']:.3f}",
            "acceptance length, predicted": f"{report['predicted']:.3f}",
            "accepted by position": ", ".join(f"{rate:.0%}" for rate in report["acceptance_rates"]),
            "draft tokens": f"{report['num_draft_tokens']}",
            "identical answers": identical_of(report),
            "tokens/s with the draft": f"{report['drafted_tokens_per_s']:.1f}",
        }
        if report["plain_tokens_per_s"] is not None:  # else a server's, which has only the draft
            found["tokens/s without"] = f"{report['plain_tokens_per_s']:.1f}"
    if "train" in records:
        train = records["train"]
        found |= {
            "best validation": f"{train['acceptance_length']:.3f} at step {train['best_step']}",
            "optimizer steps": f"{train['num_steps']:,}",
            "draft vocabulary covers": f"{train['coverage']:.2%}",
        }
        if losses := _losses(records):
            found["last training loss"] = f"{losses[-1][1]:.3f}"
    counts = (records.get("regenerate") or records.get("prepare") or {}).get("counts", {})
    if "train_supervised_tokens" in counts:
        found["supervised tokens"] = f"{counts['train_supervised_tokens']:,}"
    if "extract" in records:
        found["bytes of states"] = f"{records['extract']['num_bytes']:,}"
    timed = {stage: r["seconds"] for stage, r in records.items() if "seconds" in r}
    return found | {f"time of {stage}": duration(seconds) for stage, seconds in timed.items()}


def _stale(causes: Mapping[str, str]) -> dict[str, str]:
    """Return what is not shown of a run, and why: it does not belong to what is."""
    return {f"stale: {stage}": cause for stage, cause in causes.items()}


def _losses(records: Records) -> list[tuple[float, float]]:
    history = records["train"]["history"]
    return [(x["step"], x["loss"]) for x in history if not x.get("validation") and x.get("taken", True)]
