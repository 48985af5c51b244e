"""A run of the whole pipeline small enough for a test, driven as a user drives it."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from eyas.cli import cli
from tiny import write_jsonl

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "users", "ask"]


def write_prompts(path: Path, num: int = 24) -> Path:
    """Write single prompts and a few two-turn chats."""
    rows: list[Any] = []
    for i in range(num):
        text = " ".join(WORDS[(i * 3 + j) % len(WORDS)] for j in range(2 + i % 4)) + f" {i}?"
        if i % 6 == 5:
            turns = [("user", text), ("assistant", "Well."), ("user", "And then?")]
            rows.append({"id": f"c{i}", "messages": [{"role": r, "content": t} for r, t in turns]})
        else:
            rows.append({"id": f"c{i}", "prompt": text})
    return write_jsonl(path, rows)


def write_run(folder: Path, target: Path, **sections: Any) -> Path:
    """Write a run file for ``target`` into ``folder``; its run folder is ``folder/run``."""
    settings: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "target": {"model": str(target)},
        "data": {
            "sources": [str(write_prompts(folder / "prompts.jsonl"))],
            "max_length": 96,
            "validation_fraction": 0.2,
        },
        "regenerate": {"engine": "transformers", "max_new_tokens": 20, "batch_size": 8},
        "extract": {"engine": "transformers", "batch_tokens": 256, "shard_bytes": 60_000},
        "draft": {"vocab_size": 120, "ttt_steps": 3},
        "train": {
            "num_epochs": 1,
            "batch_tokens": 256,
            "validate_every": 2,
            "save_every": 2,
            "device": "cpu",
        },
        "evaluate": {"num_draft_tokens": 2, "num_prompts": 3, "max_new_tokens": 12},
    }
    if "architecture" in sections.get("draft", {}):
        settings["draft"] = {"vocab_size": 120}  # another kind has other settings
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section if isinstance(section, dict) else section
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@dataclass(frozen=True)
class Screen:
    """What a command showed, and its exit code."""

    code: int
    out: str
    err: str


def eyas(*arguments: str | Path) -> Screen:
    """Run ``eyas ...`` in this process."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)
    return Screen(result.exit_code, result.stdout, result.stderr)


def exported_run(folder: Path, target: Path, **sections: Any) -> Path:
    """Run all stages but the evaluation; the draft is accepted now and then. Return the run file."""
    path = write_run(
        folder,
        target,
        train={"num_epochs": 6, "learning_rate": 4e-3},
        evaluate={"num_prompts": 4, "max_new_tokens": 16, "concurrency": [1, 4]},
        **sections,
    )
    for stage in ("prepare", "regenerate", "extract", "train", "export"):
        screen = eyas(stage, "-c", path)
        assert screen.code == 0, screen.err
    return path


def snapshot(folder: Path) -> dict[str, str]:
    """Return every file below ``folder`` with its checksum."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
