"""Rates are taken from earlier runs like this one, and from no others."""

from pathlib import Path

import pytest
import yaml

from eyas.config.load import load_config
from eyas.config.schema import RunConfig
from eyas.plan.past_runs import earlier_rates
from eyas.run_folder import FOLDERS, write_record

COUNTS = {
    "train_tokens": 900,
    "held_out_tokens": 100,
    "train_supervised_tokens": 450,
    "held_out_supervised_tokens": 50,
    "train_conversations": 9,
    "held_out_conversations": 1,
}


def config_of(folder: Path, name: str, *settings: str) -> RunConfig:
    return load_config(
        None, (f"run_dir={folder / name}", "target.model=m", "data.sources=[a]", *settings)
    ).config


def finished(config: RunConfig) -> None:
    for stage, facts in (
        ("prepare", {"counts": COUNTS, "seconds": 5.0}),
        ("extract", {"seconds": 10.0}),
        ("evaluate", {"seconds": 8.0, "report": {"num_prompts": 4}}),
    ):
        write_record(config.run_dir / FOLDERS[stage], stage, {}, done=True, **facts)
    (config.run_dir / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))


def test_rates_are_work_by_the_seconds_of_the_stage(tmp_path: Path) -> None:
    finished(config_of(tmp_path, "old"))
    found = earlier_rates(config_of(tmp_path, "new"))
    assert {stage: rate for stage, (rate, _) in found.items()} == {
        "prepare": 2.0,
        "extract": 100.0,
        "evaluate": 0.5,
    }


@pytest.mark.parametrize(
    ("setting", "is_alike"),
    [
        ("seed=5", True),
        ("target.model=other", False),
        ("extract.engine=fake", False),
        ("vllm.tensor_parallel_size=2", True),  # the engine is another, which does not read it
    ],
)
def test_a_run_with_other_settings_that_matter_tells_nothing(
    setting: str, is_alike: bool, tmp_path: Path
) -> None:
    finished(config_of(tmp_path, "old"))
    assert bool(earlier_rates(config_of(tmp_path, "new", setting))) is is_alike


def test_gpus_of_the_engine_in_use_matter(tmp_path: Path) -> None:
    finished(config_of(tmp_path, "old", "extract.engine=vllm"))
    assert earlier_rates(config_of(tmp_path, "new", "extract.engine=vllm"))
    several = config_of(tmp_path, "new", "extract.engine=vllm", "vllm.tensor_parallel_size=2")
    assert not earlier_rates(several)
