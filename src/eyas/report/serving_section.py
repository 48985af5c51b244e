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
        speed = f"{point['tokens_per_s']:,.1f} tokens/s{_spread(point)}"
        gain = f", {point['speed_up']:.2f} times as fast" if point["speed_up"] else ""
        rows.append(
            (_conditions(point), f"{_name(point)}: {speed}, {point['latency_s']:.2f} s a request{gain}")
        )
    for point in served.get("arrivals", ()):
        first = f"first token {_ms(point['first_token_s'])}, p99 {_ms(point['first_token_p99_s'])}"
        later = f"between outputs {_ms(point['inter_token_s'])}, p99 {_ms(point['inter_token_p99_s'])}"
        rate = f"{point['requests_per_s']:g} arrive a second"
        rows.append((rate, f"{_name(point)}: {first}; {later}; {point['tokens_per_s']:,.1f} tokens/s"))
    if deployment := served.get("deployment"):
        rows.append(("measured with", ", ".join(f"{name} {value}" for name, value in deployment.items())))
    runners = served.get("runners", {})
    if len(set(runners.values())) > 1:
        names = (f"{_served_as(name)}: {runner or 'unknown'}" for name, runner in runners.items())
        rows.append(("model runner", ", ".join(names)))
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
                    lines[_name(p)].append((p["concurrency"], p[key]))
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


def _name(point: Mapping[str, Any]) -> str:
    """Return what drafts, as people read it."""
    k = point["num_draft_tokens"]
    if point.get("baseline"):
        return f"{_short(point['baseline'])}, K = {k}"
    return f"K = {k}" if k else "the target alone"


def _spread(point: Mapping[str, Any]) -> str:
    """Return the slowest and the fastest round; nothing for an evaluation before there were several."""
    low, high = point.get("tokens_per_s_range") or (None, None)
    return f" ({low:,.1f} to {high:,.1f})" if low is not None else ""


def _short(baseline: str) -> str:
    """Return a baseline's name without the folders that hold its model."""
    method, _, folder = baseline.partition(":")
    return f"{method} {folder.rstrip('/').rpartition('/')[2]}" if folder else method


def _served_as(name: str) -> str:
    return _short(name) if not name.isdigit() else f"K = {name}" if int(name) else "the target alone"


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1000 * seconds:,.1f} ms"


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
