"""Tables of the harness, made from its lines alone."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.drafters.common.acceptance import Acceptance
from eyas.evaluate.bootstrap import difference_interval, length_interval

Line = dict[str, Any]


def read_lines(paths: Sequence[Path]) -> list[Line]:
    return [json.loads(text) for path in paths for text in path.read_text().splitlines() if text]


def table(lines: Sequence[Line], depths: Sequence[int]) -> str:
    """Return a row for each recipe, its flags and its tokens, the best first for each target.

    Seeds are taken together, prompt by prompt. The last column is the difference to the first row of the
    target at the first K.
    """
    rows: dict[tuple[str, str, str, int], list[Line]] = defaultdict(list)
    for line in lines:
        rows[line["target"], line["recipe"], " ".join(line["flags"]), line["tokens"]].append(line)
    order = sorted(rows, key=lambda key: (key[0], -_total(rows[key], depths[0]).length))
    heads = ["target", "recipe", "flags", "tokens", "steps", "minutes", "seeds"]
    heads += [f"K = {k} (95 %)" for k in depths] + [f"difference to the first, K = {depths[0]}"]
    out = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    first: dict[str, dict[str, Acceptance]] = {}
    for key in order:
        target, recipe, flags, tokens = key
        minutes = sum(line["seconds"] for line in rows[key]) / len(rows[key]) / 60
        cells = [
            target,
            recipe,
            flags,
            f"{tokens:,}",
            rows[key][0]["steps"],
            f"{minutes:.1f}",
            len(rows[key]),
        ]
        for depth in depths:
            prompts = _by_prompt(rows[key], depth)
            interval = length_interval(list(prompts.values()))
            bounds = f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else ""
            cells.append(f"{_total(rows[key], depth).length:.3f}{bounds}")
        own = _by_prompt(rows[key], depths[0])
        best = first.setdefault(target, own)
        apart = None if best is own else difference_interval(best, own)
        cells.append(f"{apart[0]:+.3f} to {apart[1]:+.3f}" if apart else "")
        out.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(out)


def _by_prompt(lines: Sequence[Line], depth: int) -> dict[str, Acceptance]:
    """Return each prompt's rounds, those of all seeds together."""
    found: dict[str, Acceptance] = defaultdict(lambda: Acceptance.empty(depth))
    for line in lines:
        for name, (num_rounds, *accepted_at) in line["held_out"][str(depth)]["rounds"].items():
            found[name] = found[name] + Acceptance(num_rounds, tuple(accepted_at))
    return dict(found)


def _total(lines: Sequence[Line], depth: int) -> Acceptance:
    return sum(_by_prompt(lines, depth).values(), Acceptance.empty(depth))
