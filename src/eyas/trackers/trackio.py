"""trackio: figures in a local database; look with ``trackio show``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.trackers.base import require

_PROJECT = "eyas"


class TrackioTracker:
    def __init__(self, name: str, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self._trackio = require("trackio")
        self._trackio.init(project=_PROJECT, name=name, config=dict(settings), resume="allow")

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(figures), step=step)

    def close(self, failed: bool) -> None:
        self._trackio.finish()
