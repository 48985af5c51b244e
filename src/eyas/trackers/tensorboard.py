"""TensorBoard: event files in the run folder; look with ``tensorboard --logdir runs``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.trackers.base import require


class TensorBoardTracker:
    def __init__(self, name: str, run_dir: Path, settings: Mapping[str, Any]) -> None:
        require("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))
        rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
        self._writer.add_text("settings", f"| setting | value |\n| --- | --- |\n{rows}")

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self._writer.close()
