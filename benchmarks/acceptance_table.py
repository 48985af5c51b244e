"""The table of benchmarks/acceptance.py: each recipe's mean over its seeds, and replay beside decoding."""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from acceptance_recipes import BASELINES

DEPTHS = (3, 7)  # K at which acceptance is measured
SUITES = ("mt_bench", "humaneval", "gsm8k")


def read_runs(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def summarize(path: Path) -> None:
    """Print the mean of each recipe over its seeds, best first, and how replay ranks as decoding does."""
    runs = [r for r in read_runs(path) if "error" not in r]
    grouped: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        grouped[run["recipe"]].append(run)
    columns = [("held out", lambda r: r["held_out"])]
    columns += [(s, lambda r, s=s: r["suites"].get(s, {})) for s in SUITES]
    columns += [("suites", lambda r: mean_of(r["suites"].values()))]
    columns += [("temperature 1", lambda r: mean_of(r.get("sampled", {}).values()))]
    columns += [("decoded", lambda r: mean_of(r["decoded"].values()))]
    columns += [("the same replayed", lambda r: mean_of(r.get("decoded_replay", {}).values()))]
    heads = [f"{name} K={k}" for name, _ in columns for k in DEPTHS]
    print("| recipe | seeds | steps | training s | time to the baseline | " + " | ".join(heads) + " |")
    print("| --- " * (len(heads) + 5) + "|")

    def value(runs: list[dict[str, Any]], of: Any, k: int) -> str:
        values = [of(r)[f"al{k}"] for r in runs if f"al{k}" in of(r)]
        if not values:
            return ""
        spread = f" ± {(max(values) - min(values)) / 2:.3f}" if len(values) > 1 else ""
        return f"{statistics.mean(values):.3f}{spread}"

    rank = lambda name: statistics.mean(r["held_out"]["al3"] for r in grouped[name])  # noqa: E731
    peers = [name for name in grouped if name in BASELINES or name.startswith("speculators' trainer")]
    baseline = max(peers, key=rank, default=None)
    for name in sorted(grouped, key=rank, reverse=True):
        mine = grouped[name]
        seconds = statistics.mean(r["seconds"] for r in mine)
        cells = [value(mine, of, k) for _, of in columns for k in DEPTHS]
        sooner = share_of_time(mine, grouped[baseline]) if baseline else None
        first = [name, len(mine), mine[0]["steps"], f"{seconds:.0f}", f"{sooner:.0%}" if sooner else ""]
        print("| " + " | ".join(map(str, [*first, *cells])) + " |")
    for depth in DEPTHS:
        key = f"al{depth}"
        pairs = [(r["held_out"][key], mean_of(r["decoded"].values())[key]) for r in runs if any(
            key in d for d in r["decoded"].values())]  # fmt: skip
        if len(pairs) > 2:
            r = float(np.corrcoef(np.array(pairs).T)[0, 1])
            print(f"\nheld-out replay and decoding, K = {depth}: correlation {r:.3f} over {len(pairs)} runs")


def share_of_time(runs: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> float | None:
    """Return when ``runs`` accept as much of held-out answers as ``baseline`` does in the end, K = 3.

    As a share of the baseline's training time; between two measurements the curve is taken as straight.
    """
    wanted = statistics.mean(r["held_out"]["al3"] for r in baseline)
    whole = statistics.mean(r["seconds"] for r in baseline)
    curves = [r["curve"] for r in runs]
    seconds, lengths = (
        [statistics.mean(points) for points in zip(*([p[key] for p in c] for c in curves), strict=False)]
        for key in ("seconds", "al3")
    )
    for i, length in enumerate(lengths):
        if length >= wanted:
            before = (seconds[i - 1], lengths[i - 1]) if i else (0.0, 1.0)
            share = (wanted - before[1]) / (length - before[1]) if length > before[1] else 1.0
            return (before[0] + share * (seconds[i] - before[0])) / whole
    return None


def mean_of(values: Any) -> dict[str, float]:
    lists = defaultdict(list)
    for one in values:
        for key, value in one.items():
            lists[key].append(value)
    return {key: statistics.mean(found) for key, found in lists.items()}
