"""What the engine measured of a draft: rows for the screen, lines and bars for report.html."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from eyas.evaluate.near_ties import LARGE_GAP


def identical_of(report: Mapping[str, Any]) -> str:
    """Say how many of the answers with the draft are the target's own."""
    known = report["identical"] is not None
    return f"{report['identical']} of {report['num_prompts']}" if known else "not compared"


def served_rows(served: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the summary table that the engine's figures fill."""
    rows = [("served by", served["engine"])]
    for point in served["points"]:
        name = f"K = {point['num_draft_tokens']}" if point["num_draft_tokens"] else "the target alone"
        speed = f"{point['tokens_per_s']:,.1f} tokens/s, {point['latency_s']:.2f} s a request"
        gain = f", {point['speed_up']:.2f} times as fast" if point["speed_up"] else ""
        rows.append((_conditions(point), f"{name}: {speed}{gain}"))
    for row in served["categories"]:
        name = row["suite"] if row["category"] == "all" else f"{row['suite']}, {row['category']}"
        length = f"acceptance length {_bounds(row['acceptance_length'])}"
        rates = row["acceptance_rates"]
        by_position = f", by position {', '.join(f'{r:.0%}' for r in rates)}" if rates else ""
        rows.append((name, f"K = {row['num_draft_tokens']}: {length}{by_position}"))
    lossless, agreement = served["lossless"], served["agreement"]
    rows += [
        ("lossless", _lossless(lossless)),
        *(("sampling", _sampled(row)) for row in served["sampled"]),
        ("agreement", "; ".join(agreement["broken"]) or _agreement(agreement)),
        ("recommendation", served["recommendation"]),
    ]  # fmt: skip
    return rows


def _lossless(lossless: Mapping[str, Any]) -> str:
    text = f"{lossless['compared']} answers compared, {len(lossless['differences'])} near-ties"
    share = lossless["rounding"]["share_of_large_gaps"]
    return text if share is None else f"{text}, {share:.0%} of them with a gap above {LARGE_GAP} logits"


def _sampled(row: Mapping[str, Any]) -> str:
    verdict = "another distribution" if row["differs"] else "the target's distribution"
    return (
        f"K = {row['num_draft_tokens']}, temperature {row['temperature']:g}: {verdict} "
        f"(p = {row['p_value']:.2g}, {row['num_samples']} answers; a total variation of "
        f"{row['detectable']:.2f} is detected nine times in ten)"
    )


def served_charts(served: Mapping[str, Any]) -> list[tuple[str, dict[str, list[tuple[float, float]]], str]]:
    """Return (heading, lines, unit) of speed over concurrency, where there is more than one to draw."""
    charts = []
    for temperature in sorted({p["temperature"] for p in served["points"]}):
        points = [p for p in served["points"] if p["temperature"] == temperature]
        for title, key, unit in (
            ("Throughput", "tokens_per_s", "tokens/s"),
            ("Latency of a request", "latency_s", "seconds, median"),
            ("Speed-up over the target alone", "speed_up", "times"),
        ):
            lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
            for p in points:
                if p[key] is not None:
                    k = p["num_draft_tokens"]
                    lines[f"K = {k}" if k else "target alone"].append((p["concurrency"], p[key]))
            if any(len(line) > 1 for line in lines.values()):
                charts.append((f"{title}, temperature {temperature:g}", dict(lines), unit))
    return charts


def served_lengths(served: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the acceptance length of each suite and category as bars."""
    return [
        (f"{row['category'] if row['category'] != 'all' else row['suite']}, K = {row['num_draft_tokens']}",
         row["acceptance_length"][0])
        for row in served["categories"]
    ]  # fmt: skip


def _conditions(point: dict[str, Any]) -> str:
    return f"{point['concurrency']} at a time, temperature {point['temperature']:g}"


def _agreement(agreement: dict[str, Any]) -> str:
    if agreement["served"] is None:
        return "no answers of the same text, with a round of the draft, to compare"
    served, reference = _bounds(agreement["served"]), agreement["reference"]
    return f"{agreement['compared']} answers of the same text: served {served}, expected {reference:.3f}"


def _bounds(length: list[float]) -> str:
    low, high = (f"{value:.3f}" for value in length)
    return low if low == high else f"{low} to {high}"
