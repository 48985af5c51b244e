"""A target that cannot fit is refused from its headers, before anything is loaded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.config.schema import VllmSettings
from eyas.engines.vllm import engine_args, memory
from eyas.engines.vllm.engine_args import Plan, environment
from eyas.engines.vllm.memory import Device, check_memory, gpus, weight_bytes
from eyas.errors import UserError
from vllm_cases import make_model, spec_of_model

GIB = 1 << 30


@pytest.fixture(scope="module")
def plan_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Plan]:
    folder = make_model(tmp_path_factory.mktemp("model"))

    def plan(**settings: object) -> Plan:
        return Plan(
            folder, spec_of_model(folder, (1, 2)), VllmSettings(**settings), 257, 64, 8, False, "native"
        )

    return plan


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def patch(weights: int, total: int, free: int) -> None:
        monkeypatch.setattr(memory, "is_cpu_build", lambda: False)
        monkeypatch.setattr(memory, "weight_bytes", lambda *_: weights)
        monkeypatch.setattr(memory, "gpus", lambda: [Device(f"GPU {i}", total, free) for i in range(8)])
        monkeypatch.setattr(memory, "_SETTLE_S", 0.0)

    return patch


def test_floats_count_as_they_are_loaded_and_quantized_weights_as_they_are_stored(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(10, 4), "b": torch.zeros(6, dtype=torch.int8), "c": torch.zeros(3).half()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert weight_bytes(tmp_path, "bfloat16") == 80 + 6 + 6
    assert weight_bytes(tmp_path, "float32") == 160 + 6 + 12
    # Some models come a second time in their maker's own format, which no engine loads.
    save_file(tensors, tmp_path / "consolidated.safetensors")
    assert weight_bytes(tmp_path, "bfloat16") == 80 + 6 + 6


def test_a_target_larger_than_the_memory_of_this_machine(
    plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "is_cpu_build", lambda: True)
    monkeypatch.setattr(memory, "weight_bytes", lambda *_: 60 * GIB)
    monkeypatch.setattr(memory, "available_bytes", lambda: 20 * GIB)
    plan = plan_of(kv_cache_bytes=GIB)
    with pytest.raises(UserError) as error:
        check_memory(plan)
    assert error.value.what == (
        f"{plan.folder} needs about 60.0 GiB for its weights and 1.0 GiB for its cache; "
        "20.0 GiB of memory are available"
    )
    assert error.value.hint.startswith("free memory, or set a smaller data.max_length")
    monkeypatch.setattr(memory, "available_bytes", lambda: 62 * GIB)
    check_memory(plan)


def test_a_target_larger_than_its_share_of_the_gpus(plan_of: Callable[..., Plan], on_gpus: Callable) -> None:
    on_gpus(weights=140 * GIB, total=80 * GIB, free=79 * GIB)
    plan = plan_of(gpu_memory_utilization=0.8)
    with pytest.raises(UserError) as error:
        check_memory(plan)
    assert error.value.what == (
        f"{plan.folder} needs about 140.0 GiB on each of 1 GPUs, GPU 0 gives 64.0 GiB "
        "of 80.0 GiB (vllm.gpu_memory_utilization=0.8)"
    )
    assert error.value.hint == "set a larger vllm.tensor_parallel_size"
    with pytest.raises(UserError, match=r"70\.0 GiB on each of 2 GPUs"):
        check_memory(plan_of(gpu_memory_utilization=0.8, tensor_parallel_size=2))
    check_memory(plan_of(gpu_memory_utilization=0.8, tensor_parallel_size=4))


def test_a_gpu_that_somebody_else_holds(plan_of: Callable[..., Plan], on_gpus: Callable) -> None:
    on_gpus(weights=10 * GIB, total=80 * GIB, free=40 * GIB)
    with pytest.raises(UserError) as error:
        check_memory(plan_of())
    assert error.value.what == (
        "GPU 0 has 40.0 GiB free of 80.0 GiB, less than vllm.gpu_memory_utilization=0.9 of it"
    )
    assert error.value.hint.endswith("or set vllm.gpu_memory_utilization=0.5")
    check_memory(plan_of(gpu_memory_utilization=0.4))


def test_a_shape_without_weights_needs_no_files(tmp_path: Path, plan_of: Callable[..., Plan]) -> None:
    plan = replace(plan_of(engine_args=("load_format=dummy",)), folder=tmp_path)
    check_memory(plan)
    with pytest.raises(UserError, match="holds no"):
        check_memory(replace(plan, settings=VllmSettings()))


def test_on_gpus_vllm_starts_its_processes_anew_unless_told_otherwise(
    plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in environment(plan_of())
    monkeypatch.setattr(engine_args, "is_cpu_build", lambda: False)
    assert environment(plan_of())["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in environment(plan_of())


def test_a_target_in_float32_is_computed_in_float32(
    plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    plan = plan_of()
    assert environment(plan)["TRITON_F32_DEFAULT"] == "ieee"
    half = replace(plan, spec=replace(plan.spec, dtype="bfloat16"))
    assert "TRITON_F32_DEFAULT" not in environment(half)
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")
    assert "TRITON_F32_DEFAULT" not in environment(plan)


def test_without_nvidia_smi_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpus() == []
