"""What a run asks of its engines is compared with their facts, before anything starts."""

from typing import Any

import pytest

from eyas.config.load import load_config
from eyas.config.schema import RunConfig
from eyas.engines.checks import (
    check_abilities,
    check_engine_a_rank,
    check_evaluation,
    check_fleet,
    check_gpu_share,
    check_installed,
    engine_of,
    engines_of,
)
from eyas.errors import UserError


def config_of(*settings: str) -> RunConfig:
    return load_config(None, ("run_dir=r", "target.model=m", "data.sources=[a]", *settings)).config


def refusal(check: Any, *arguments: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        check(*arguments)
    return caught.value


@pytest.mark.parametrize(
    ("setting", "what", "hint"),
    [
        ("extract.engine=sglang", "extract.engine=sglang: SGLang captures no states", "fake or"),
        ("regenerate.engine=sglang", "regenerate.engine=sglang: SGLang generates no answers", "or vllm"),
        ("evaluate.engine=fake", "evaluate.engine=fake: fake does not decode", "transformers or vllm"),
        ("evaluate.engine=vlm", "unknown engine 'vlm'; did you mean 'vllm'?", "known: fake, sglang,"),
        ("extract.endpoint=http://h/v1", "extract.endpoint is a vLLM server's", "set extract.engine=vllm,"),
    ],
)
def test_an_engine_is_refused_for_what_it_cannot_do(setting: str, what: str, hint: str) -> None:
    error = refusal(check_abilities, config_of(setting))
    assert what in error.what
    assert hint in str(error.hint)


def test_engines_that_can_are_accepted() -> None:
    check_abilities(config_of())
    check_abilities(config_of("extract.engine=vllm", "extract.endpoint=http://h/v1", "evaluate.engine=vllm"))


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("evaluate.benchmarks=[gsm8k]", "benchmarks"),
        ("evaluate.sweep_draft_tokens=[5]", "sweep_draft_tokens"),
        ("evaluate.concurrency=[1,4]", "concurrency"),
        ("evaluate.temperatures=[0,0.7]", "temperatures"),
    ],
)
def test_what_only_a_serving_engine_reads_is_refused_without_one(setting: str, name: str) -> None:
    error = refusal(check_evaluation, config_of(setting).evaluate)
    assert error.what == f"evaluate.{name} is measured in an engine that serves, and none is named"
    assert error.hint == "set evaluate.engine=sglang or vllm, or evaluate.endpoint=URL"
    for serving in ("evaluate.engine=vllm", "evaluate.endpoint=http://h/v1"):
        check_evaluation(config_of(setting, serving).evaluate)


def test_a_default_that_is_written_out_is_no_wish() -> None:
    check_evaluation(
        config_of("evaluate.temperatures=[0]", "evaluate.concurrency=[1,2,4,8,16,32,64]").evaluate
    )


def test_a_stage_starts_no_engine_where_a_server_or_other_machines_work() -> None:
    config = config_of("extract.engine=vllm", "evaluate.engine=vllm")
    assert [info.name for info in engines_of(config)] == ["transformers", "vllm"]
    for setting, stage in (
        ("regenerate.endpoint=http://h/v1", "regenerate"),
        ("regenerate.enabled=false", "regenerate"),
        ("extract.endpoint=http://h/v1", "extract"),
        ("extract.fleet={replicas: 2}", "extract"),
        ("evaluate.endpoint=http://h/v1", "evaluate"),
        ("seed=1", "train"),
    ):
        assert engine_of(config_of("extract.engine=vllm", setting), stage) is None


def test_only_the_engines_of_the_stages_asked_for_have_to_be_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("eyas.engines.vllm.versions.is_installed", lambda: False)
    config = config_of("extract.engine=vllm")
    check_installed(config, ["prepare", "regenerate", "train", "export", "evaluate"])
    assert refusal(check_installed, config, ["extract"]).what == "the engine vllm is not installed"


def test_an_engine_of_another_number_of_gpus_than_a_replica_has_is_refused() -> None:
    settings = ("extract.engine=vllm", "vllm.tensor_parallel_size=4")
    error = refusal(check_fleet, config_of(*settings, "extract.fleet={replicas: 2, gpus_per_replica: 8}"))
    assert error.what == (
        "extract.fleet.gpus_per_replica=8, but one engine uses vllm.tensor_parallel_size=4 GPUs"
    )
    check_fleet(config_of(*settings, "extract.fleet={replicas: 2, gpus_per_replica: 4}"))
    check_fleet(config_of(*settings, "extract.fleet={replicas: 2, gpus_per_replica: 0}"))
    check_fleet(config_of("extract.fleet={replicas: 2, gpus_per_replica: 8}"))


def test_ranks_share_no_engine_of_several_gpus() -> None:
    config = config_of("extract.engine=vllm", "vllm.tensor_parallel_size=2")
    assert "vllm.tensor_parallel_size=2" in refusal(check_engine_a_rank, config, 2).what
    check_engine_a_rank(config, 1)
    check_engine_a_rank(config_of("vllm.tensor_parallel_size=2"), 2)


def test_a_reserved_share_leaves_room_for_training_or_is_refused() -> None:
    config = config_of("extract.engine=vllm", "vllm.gpu_memory_utilization=0.9")
    check_gpu_share(config, 9 << 30, 100 << 30)
    error = refusal(check_gpu_share, config, 40 << 30, 100 << 30)
    assert "40.0 GiB next to vLLM, whose share of 0.9 leaves 10.0 GiB" in error.what
    assert error.hint == "set vllm.gpu_memory_utilization=0.6"
    assert "train.source=store" in str(refusal(check_gpu_share, config, 200 << 30, 100 << 30).hint)
