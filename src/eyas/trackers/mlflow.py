"""MLflow; the server and experiment are its own settings (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.trackers.base import require


class MlflowTracker:
    def __init__(self, name: str, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self._mlflow = require("mlflow")
        self._mlflow.start_run(run_name=name)
        self._mlflow.log_params({key: str(value)[:500] for key, value in settings.items()})

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(figures), step=step)

    def close(self, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")
