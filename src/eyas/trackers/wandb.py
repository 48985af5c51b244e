"""Weights & Biases; account, project and offline mode are its own settings (WANDB_*, wandb login)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.trackers.base import require


class WandbTracker:
    def __init__(self, name: str, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self._run = require("wandb").init(name=name, dir=str(run_dir), config=dict(settings))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)
