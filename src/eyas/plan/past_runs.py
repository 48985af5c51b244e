"""Rates of runs that are done, for estimates of one like them."""

from pathlib import Path
from typing import Any

from eyas.config.load import RUN_FILE, read_settings
from eyas.config.schema import RunConfig
from eyas.engines.info import engine_info
from eyas.errors import EyasError
from eyas.plan.measure_rates import VALIDATION_COST
from eyas.run_folder import FOLDERS, STAGES, read_record


def earlier_rates(config: RunConfig) -> dict[str, tuple[float, str]]:
    """Return rates of finished stages of alike runs in the same folder, the newest first, with where.

    Units: those of ``plan``, a second of the whole stage, its start included.
    """
    rates: dict[str, tuple[float, str]] = {}
    run_dir = config.run_dir
    siblings = [p for p in run_dir.parent.glob("*") if p.is_dir()] if run_dir.parent.is_dir() else []
    for folder in sorted(siblings, key=lambda p: p.stat().st_mtime, reverse=True):
        for stage, rate in _rates_of(folder, config).items():
            rates.setdefault(stage, (rate, str(folder)))
    return rates


def _rates_of(run_dir: Path, config: RunConfig) -> dict[str, float]:
    try:
        records = {s: read_record(run_dir / FOLDERS[s]) for s in STAGES}
    except EyasError:
        return {}
    done = {s: r for s, r in records.items() if r and r["done"] and r.get("seconds")}
    samples = done.get("regenerate") or done.get("prepare")
    if not samples or "counts" not in samples or not _is_alike(run_dir, config):
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


def _is_alike(run_dir: Path, config: RunConfig) -> bool:
    """Whether a run had the settings that rates depend on."""
    if not (run_dir / "run.yaml").is_file():
        return False
    there, here = read_settings(run_dir / RUN_FILE), config.model_dump(mode="json")
    if _draft_of(there) != _draft_of(here):
        return False
    engines = {config.extract.engine, config.regenerate.engine}
    keys = (("target", "model"), ("target", "dtype"), ("extract", "engine"), ("regenerate", "engine"),
            ("regenerate", "endpoint"), ("regenerate", "batch_size"), ("train", "device"),
            ("train", "compute_dtype"), ("train", "batch_tokens"), ("evaluate", "max_new_tokens"),
            *(key for name in engines for key in engine_info(name).speed_settings))  # fmt: skip
    return all(there.get(section, {}).get(key) == here[section][key] for section, key in keys)


def _draft_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a draft's shape and training; where it starts from does not matter here."""
    return {key: value for key, value in settings.get("draft", {}).items() if key != "init_from"}
