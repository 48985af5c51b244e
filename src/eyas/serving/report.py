"""What an evaluation found, as ``evaluation/report.json`` and its tables hold it."""

import csv
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.config.schema import EvaluateSettings
from eyas.drafters.common.acceptance import Acceptance
from eyas.evaluate.bootstrap import length_interval
from eyas.evaluate.contexts import by_context
from eyas.evaluate.decode import Decoded
from eyas.evaluate.lossless import check_lossless, check_rounding
from eyas.evaluate.two_samples import check_sampled
from eyas.files import atomic_file, write_json
from eyas.serving.agreement import HeldOut, check_agreement
from eyas.serving.results import HELD_OUT


def evaluation_report(
    settings: EvaluateSettings, dtype: str, device: str, held_out: HeldOut, served: dict[str, Any] | None
) -> dict[str, Any]:
    """Put the results together; what was not decoded in this process is the engine's.

    ``temperature`` is that of the headline results, which are greedy; ``served`` has those of the others.
    """
    here = held_out.here
    num_prompts, predicted = len(held_out.prompts), held_out.total_predicted()
    report: dict[str, Any] = {
        "num_draft_tokens": settings.num_draft_tokens,
        "num_prompts": num_prompts,
        "max_new_tokens": settings.max_new_tokens,
        "temperature": 0.0,
        "dtype": dtype,
        "device": device,
        "predicted": predicted.length if held_out.predicted else None,
        "predicted_rates": predicted.rates,
        "predicted_interval": length_interval(list(held_out.predicted.values())),
        "prompts": _by_prompt(held_out),
        "by_context": _by_context(held_out, settings.num_draft_tokens),
        "served": served,
    }
    differences = [vars(d) for d in here.differences] if here else []
    if served is not None:
        differences += served["lossless"]["differences"]
    report["differences"] = differences
    report["rounding"] = here.rounding() if here else None
    report["sampled"] = list(here.sampled) if here else []
    acceptance = held_out.total_decoded()
    if here is not None and acceptance is not None:
        return report | {
            "acceptance": acceptance.length,
            "acceptance_rates": acceptance.rates,
            "acceptance_interval": length_interval(list(held_out.decoded().values())),
            "identical": num_prompts - len(here.differences),
            "plain_tokens_per_s": _rate(here.plain.values()),
            "drafted_tokens_per_s": _rate(here.drafted.values()),
        }
    assert served is not None
    return report | served_results(served, settings.num_draft_tokens)


def served_results(served: dict[str, Any], num_draft_tokens: int) -> dict[str, Any]:
    """Return the run's headline results from the engine, for a run that decodes nothing in this process.

    They are greedy, with the smallest number of requests at a time.
    """
    own = [c for c in served["categories"] if c["num_draft_tokens"] == num_draft_tokens]
    held_out = next(c for c in own if c["suite"] == HELD_OUT and c["temperature"] == 0)
    greedy = [p for p in served["points"] if p["temperature"] == 0 and not p.get("baseline")]
    points = {p["num_draft_tokens"]: p["tokens_per_s"] for p in reversed(greedy)}
    return {
        "acceptance": held_out["acceptance_length"][0],
        "acceptance_rates": held_out["acceptance_rates"] or [],
        "acceptance_interval": None,  # its counters are of all prompts together
        "identical": served["lossless"]["identical_held_out"],
        "plain_tokens_per_s": points.get(0),
        "drafted_tokens_per_s": points[num_draft_tokens],
    }


def check_report(report: Mapping[str, Any]) -> None:
    """Raises: ContractError where answers or lengths in a report contradict a contract."""
    served, dtype = report["served"], report["dtype"]
    check_lossless(report["differences"], dtype)
    for rounding in (report["rounding"], served and served["lossless"]["rounding"]):
        check_rounding(rounding, dtype)
    check_sampled(report["sampled"])
    check_agreement(served, dtype)


def _by_prompt(held_out: HeldOut) -> dict[str, dict[str, Any]]:
    """Return rounds and accepted draft tokens of each prompt, from which intervals are made."""
    parts = {"decoded": held_out.decoded(), "predicted": held_out.predicted}
    return {
        part: {name: vars(acceptance) for name, acceptance in found.items()} for part, found in parts.items()
    }


def _by_context(held_out: HeldOut, num_draft_tokens: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the acceptance of rounds by the length of their context, decoded here and predicted."""
    lengths = {prompt.prompt_id: len(prompt.token_ids) for prompt in held_out.prompts}
    drafted = held_out.here.drafted if held_out.here else {}
    parts: dict[str, Mapping[str, Sequence[int]]] = {
        "decoded": {name: [n for _, n in answer.rounds] for name, answer in drafted.items()},
        "predicted": held_out.predicted_rounds,
    }
    return {
        part: {
            context: {**vars(acceptance), "length": acceptance.length}
            for context, acceptance in by_context(
                ((lengths[name], rounds) for name, rounds in found.items()), num_draft_tokens
            ).items()
        }
        for part, found in parts.items()
    }


def prompts_of(report: Mapping[str, Any]) -> dict[str, Acceptance]:
    """Return the acceptance of each decoded prompt in a report; empty for one of an earlier version."""
    found = report.get("prompts", {}).get("decoded", {})
    return {name: Acceptance(p["num_rounds"], tuple(p["accepted_at"])) for name, p in found.items()}


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write report.json, and the tables of a draft that was served."""
    write_json(folder / "report.json", report)
    if (served := report["served"]) is not None:
        _write_csv(folder / "serving.csv", served["points"])
        if arrivals := served.get("arrivals"):
            _write_csv(folder / "arrivals.csv", arrivals)
        _write_csv(folder / "categories.csv", served["categories"])


def _rate(decoded: Collection[Decoded]) -> float:
    return sum(len(d.token_ids) for d in decoded) / sum(d.seconds for d in decoded)


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a table; bounds and rates become one column each."""
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    with atomic_file(path) as beside, beside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(flat)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in row.items():
        if name == "acceptance_length":
            out["acceptance_length_low"], out["acceptance_length_high"] = value or (None, None)
        elif name == "tokens_per_s_range":
            out["tokens_per_s_slowest"], out["tokens_per_s_fastest"] = value or (None, None)
        elif name == "acceptance_rates":
            out |= {f"acceptance_rate_{k}": rate for k, rate in enumerate(value or (), 1)}
        else:
            out[name] = value
    return out
