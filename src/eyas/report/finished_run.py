"""What a report and a model card are made from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.config.load import LoadedConfig
from eyas.config.schema import RunConfig
from eyas.drafters.base import Drafter
from eyas.types import TargetSpec


@dataclass(frozen=True)
class FinishedRun:
    """A run's settings, its target and its records by stage; one that is not finished or stale has none.

    ``spec`` has the aux layers that the draft reads; ``data_folder`` holds the samples that were trained on.
    """

    loaded: LoadedConfig
    drafter: Drafter
    spec: TargetSpec
    records: Mapping[str, Mapping[str, Any]]
    data_folder: Path
    # The records of evaluations with other settings, by name.
    other_evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @property
    def evaluation(self) -> Mapping[str, Any]:
        """What evaluate measured. Raises: KeyError when it has not finished."""
        report: Mapping[str, Any] = self.records["evaluate"]["report"]
        return report

    def facts(self, stage: str) -> Mapping[str, Any]:
        """Return a stage's record, empty where it never began."""
        return self.records.get(stage, {})

    @property
    def trained_on(self) -> str:
        """What the supervised tokens are of; samples from elsewhere do not say of which conversations."""
        counts = self.counts
        if "train_conversations" in counts:
            return f"{counts['train_conversations']:,} conversations"
        return f"{counts.get('train_samples', 0):,} samples"

    @property
    def counts(self) -> Mapping[str, Any]:
        """Conversations and tokens of the samples that were trained on."""
        counts: Mapping[str, Any] = self.facts(
            "regenerate" if self.config.regenerate.enabled else "prepare"
        ).get("counts", {})
        return counts
