"""What report.html shows of training and measurements: points, bars and rows, one function each."""

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.report.finished_run import FinishedRun
from eyas.report.serving_section import identical_of


def curves(history: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return loss and acceptance length over the optimizer's steps, as named lines."""
    steps = [row for row in history if not row.get("validation") and row.get("taken", True)]
    checks = [row for row in history if row.get("validation")]
    return {
        "loss": {
            "training": [(r["step"], r["loss"]) for r in steps],
            "held out": [(r["step"], r["loss"]) for r in checks],
        },
        "lengths": {"held out": [(r["step"], r["acceptance_length"]) for r in checks]},
    }


def positions(report: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return acceptance by draft position, decoded and predicted, as bars."""
    pairs = zip(report["acceptance_rates"], report["predicted_rates"], strict=False)  # SGLang has no rates
    return [
        (f"token {k}, {which}", rate)
        for k, (decoded, predicted) in enumerate(pairs, 1)
        for which, rate in (("decoded", decoded), ("predicted", predicted))
    ]


def layers(found: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return what the captured states look like, layer by layer: ``rms`` as bars, and all as ``rows``."""
    rows: list[tuple[str, ...]] = []
    rms: list[tuple[str, float]] = []
    for split, table in found.items():
        for layer, row in table.items():
            figures = (f"{row[key]:.4g}" for key in ("min", "max", "mean", "rms"))
            rows.append((f"{layer}, {split.replace('_', ' ')}", *figures))
            if split == "train":
                rms.append((f"layer {layer}", row["rms"]))
    return {"rms": rms, "rows": rows}


def checks(run: FinishedRun) -> list[tuple[str, str]]:
    """Return the contracts that the finished stages have passed; a stage stops where one does not hold."""
    report, spec = run.evaluation, run.spec
    dropped = sum(run.facts("prepare").get("drops", {}).values())
    failures = run.facts("extract")["num_failures"]
    lossless = f"answers that are the target's own, token for token: {identical_of(report)}"
    if report["differences"]:
        lossless += "; each other one first differs at a near-tie of the target's likeliest tokens"
    rows = [
        ("data", f"every row kept or dropped with a reason ({dropped:,} dropped)"),
        ("tokenizer, template", f"the same in every stage ({spec.tokenizer_fingerprint}, "
                                f"{spec.template_fingerprint})"),
        ("probe", "at the engine's start and end: teacher rebuilt from the states agrees with the engine, "
                  "alone and in a batch; layers differ from each other and from zero"),
        ("states", f"tokens in = tokens out, finite, as large as in the probe; {failures:,} samples failed"),
        ("shards", "checksummed when written, verified when read"),
        ("export", "reloaded; its logits equal the trained draft's"),
    ]  # fmt: skip
    if report["identical"] is not None:
        rows.append(("lossless", lossless))
    return rows


def other_evaluations(run: FinishedRun) -> list[tuple[str, str]]:
    """Return a row for each evaluation with other settings: its conditions, and what it measured."""
    draft = run.facts("export").get("output")
    rows = []
    for name, record in run.other_evaluations.items():
        report = record["report"]
        stale = "" if record["inputs"]["draft"] == draft else "stale, of an earlier draft: "
        where = report["served"]["engine"] if report["served"] else f"this process, {report['device']}"
        rows.append((
            name,
            f"{stale}acceptance length {report['acceptance']:.3f} with K = {report['num_draft_tokens']}, "
            f"{report['num_prompts']} held-out prompts, up to {report['max_new_tokens']} tokens, {where}",
        ))  # fmt: skip
    return rows
