"""A calibration runs the stages that it is given on a few rows, and divides work by time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from eyas.config.load import load_config
from eyas.config.schema import RunConfig
from eyas.errors import UserError
from eyas.plan.measure_rates import Rows, calibrate, read_rows
from eyas.progress import Progress
from tiny import write_jsonl

COUNTS = {
    "train_tokens": 900,
    "held_out_tokens": 100,
    "train_supervised_tokens": 450,
    "held_out_supervised_tokens": 50,
    "train_conversations": 9,
    "held_out_conversations": 1,
}


class Trial:
    """Stages that show a progress of 24 rows and claim to have taken two seconds more than it."""

    stages = ("prepare", "extract")

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.ran: list[str] = []

    def run(self, stage: str) -> None:
        self.ran.append(stage)
        with Progress({"extract": "extract train"}.get(stage, stage), 24, "rows") as progress:
            progress.advance(24)

    def facts(self, stage: str) -> Mapping[str, Any]:
        return {"seconds": 2.0, "counts": COUNTS}


def config_of(*settings: str) -> RunConfig:
    return load_config(None, ("run_dir=r", "target.model=m", "regenerate.enabled=false", *settings)).config


def test_every_stage_of_a_trial_gets_a_rate_and_a_fixed_time() -> None:
    trials: list[Trial] = []

    def new_trial(config: RunConfig) -> Trial:
        trials.append(Trial(config))
        return trials[-1]

    rows = Rows([{"prompt": str(i)} for i in range(40)], 4000, exact=False)
    found = calibrate(config_of("data.sources=[a]", "train.source=stream"), rows, new_trial)
    assert [t.ran for t in trials] == [["prepare"], ["prepare", "extract"]]
    assert set(found.rates) == {"prepare", "extract"}
    assert found.fixed_s["extract"] == pytest.approx(2.0, abs=0.2)
    assert (found.kept_share, found.tokens_per_conversation, found.supervised_share) == (0.25, 100, 0.5)
    few = trials[1].config
    assert (few.data.validation_fraction, few.train.source, few.train.num_epochs) == (0.2, "store", 1)
    assert not Path(few.run_dir).exists(), "the trial is cleared away"


def test_rows_are_sampled_and_counted(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"prompt": str(i)} for i in range(50)])
    found = read_rows(config_of(f"data.sources=[{data}]"))
    assert (found.total, found.exact, len(found.sample)) == (50, True, 50)


def test_standard_input_is_left_for_the_run() -> None:
    with pytest.raises(UserError, match="cannot read standard input"):
        read_rows(config_of("data.sources=[-]"))
