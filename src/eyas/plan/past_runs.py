"""Rates of runs that are done, for estimates of one like them."""

from pathlib import Path

import yaml

from eyas.errors import EyasError
from eyas.plan.measure_rates import VALIDATION_COST
from eyas.run_folder import FOLDERS, STAGES, read_record
from eyas.stages.run_context import RunContext


def earlier_rates(context: RunContext) -> dict[str, tuple[float, str]]:
    """Return rates of finished stages of alike runs in the same folder, the newest first, with where.

    Units: those of ``plan``, a second of the whole stage, its start included.
    """
    rates: dict[str, tuple[float, str]] = {}
    run_dir = context.config.run_dir
    siblings = [p for p in run_dir.parent.glob("*") if p.is_dir()] if run_dir.parent.is_dir() else []
    for folder in sorted(siblings, key=lambda p: p.stat().st_mtime, reverse=True):
        for stage, rate in _rates_of(folder, context).items():
            rates.setdefault(stage, (rate, str(folder)))
    return rates


def _rates_of(run_dir: Path, context: RunContext) -> dict[str, float]:
    try:
        records = {s: read_record(run_dir / FOLDERS[s]) for s in STAGES}
    except EyasError:
        return {}
    done = {s: r for s, r in records.items() if r and r["done"] and r.get("seconds")}
    samples = done.get("regenerate") or done.get("prepare")
    if not samples or "counts" not in samples or not _is_alike(run_dir, context):
        return {}
    counts = samples["counts"]
    total = counts.get("train_tokens", 0) + counts.get("held_out_tokens", 0)
    supervised = counts.get("train_supervised_tokens", 0) + counts.get("held_out_supervised_tokens", 0)
    amounts: dict[str, float] = {"regenerate": supervised, "extract": total}
    if "prepare" in done:
        kept = done["prepare"]["counts"]
        amounts["prepare"] = kept.get("train_conversations", 0) + kept.get("held_out_conversations", 0)
    if "train" in done:
        epochs = done["train"]["inputs"]["train"]["num_epochs"]
        checks = sum(bool(row.get("validation")) for row in done["train"]["history"])
        amounts["train"] = epochs * counts["train_tokens"] + checks * VALIDATION_COST * counts.get(
            "held_out_tokens", 0
        )
        stream = done["train"].get("stream")
        if stream:  # extract took the held-out samples only, and training took turns with the engine
            share = stream["num_tokens"] / (epochs * counts["train_tokens"])
            done["extract"] = {"seconds": stream["engine_s"]}
            amounts["extract"] = stream["num_captured"]
            done["train"] = {"seconds": stream["trainer_s"]}
            amounts["train"] *= share
    elif "splits" in done.get("extract", {}).get("inputs", {}):
        del amounts["extract"]
    if "evaluate" in done:
        amounts["evaluate"] = done["evaluate"]["report"]["num_prompts"]
    return {s: amount / done[s]["seconds"] for s, amount in amounts.items() if s in done and amount}


def _is_alike(run_dir: Path, context: RunContext) -> bool:
    """Whether a run had the settings that rates depend on."""
    path = run_dir / "run.yaml"
    if not path.is_file():
        return False
    there, here = yaml.safe_load(path.read_text(encoding="utf-8")), context.config.model_dump(mode="json")
    keys = (("target", "model"), ("target", "dtype"), ("extract", "engine"), ("regenerate", "engine"),
            ("regenerate", "endpoint"), ("regenerate", "batch_size"), ("train", "device"),
            ("train", "compute_dtype"), ("train", "batch_tokens"), ("evaluate", "max_new_tokens"),
            ("vllm", "tensor_parallel_size"))  # fmt: skip
    drafts = [{k: v for k, v in run.get("draft", {}).items() if k != "init_from"} for run in (there, here)]
    return drafts[0] == drafts[1] and all(
        there.get(section, {}).get(key) == here[section][key] for section, key in keys
    )
