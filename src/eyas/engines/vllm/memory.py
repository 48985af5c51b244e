"""Whether a target fits before it is loaded: from its safetensors headers and its shape alone."""

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from eyas.engines.vllm.engine_args import Plan, cache_bytes
from eyas.engines.vllm.versions import is_cpu_build
from eyas.errors import UserError
from eyas.targets.weights import Weights

_FLOATS = {"F64", "F32", "BF16", "F16"}
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_SETTLE_S = 10.0  # an engine that was just ended may still hold its memory


@dataclass(frozen=True)
class Device:
    """Memory of one GPU, in bytes."""

    name: str
    total: int
    free: int


def check_memory(plan: Plan) -> None:
    """Refuse what cannot fit, by a rough estimate that leaves out what is computed on the way.

    Raises: UserError when weights and the cache of one longest sample are more than there is.
    """
    ranks = plan.settings.tensor_parallel_size
    is_shape = "load_format=dummy" in plan.settings.engine_args  # to be timed: it has no files
    weights = 0 if is_shape else weight_bytes(plan.folder, plan.spec.dtype)
    if is_cpu_build():
        needed, available = weights + cache_bytes(plan), available_bytes()
        if needed > available:
            raise UserError(
                f"{plan.spec.model} needs about {_gib(weights)} for its weights and "
                f"{_gib(needed - weights)} for its cache; {_gib(available)} of memory are available",
                hint="free memory, or set a smaller data.max_length or extract.batch_tokens",
            )
        return
    on_each = weights // ranks + _sample_bytes(plan) // ranks
    share = plan.settings.gpu_memory_utilization
    for device in gpus()[:ranks]:
        given = int(share * device.total)
        if on_each > given:
            raise UserError(
                f"{plan.spec.model} needs about {_gib(on_each)} on each of {ranks} GPUs, {device.name} gives "
                f"{_gib(given)} of {_gib(device.total)} (vllm.gpu_memory_utilization={share})",
                hint="set a larger vllm.tensor_parallel_size",
            )
    deadline = time.monotonic() + _SETTLE_S
    while full := [d for d in gpus()[:ranks] if share * d.total > d.free]:
        if time.monotonic() > deadline:
            raise UserError(
                f"{full[0].name} has {_gib(full[0].free)} free of {_gib(full[0].total)}, less than "
                f"vllm.gpu_memory_utilization={share} of it",
                hint="end what holds the rest (nvidia-smi shows it), choose other GPUs with "
                f"CUDA_VISIBLE_DEVICES, or set vllm.gpu_memory_utilization="
                f"{int(100 * full[0].free / full[0].total) / 100}",
            )
        time.sleep(0.5)


def weight_bytes(folder: Path, dtype: str) -> int:
    """Return what the weights take once loaded: floats as ``dtype``, quantized tensors as they are stored."""
    weights, total = Weights(folder), 0
    for name in weights.file_of:
        entry = weights.entry(name)
        size = entry.stop - entry.start
        if entry.dtype in _FLOATS:
            size = entry.num_elements * _ITEMSIZE[dtype]
        total += size
    return total


def _sample_bytes(plan: Plan) -> int:
    """Return what the longest sample takes in the cache, its states included."""
    spec = plan.spec
    cache = 2 * spec.num_layers * spec.num_key_value_heads * spec.head_dim * _ITEMSIZE[spec.dtype]
    return plan.max_model_len * (cache + (plan.bytes_per_token if plan.way == "native" else 0))


def available_bytes() -> int:
    """Return the memory that programs can still have."""
    return int(psutil.virtual_memory().available)


def gpus() -> list[Device]:
    """Return the visible GPUs, or none where nvidia-smi cannot say; no CUDA context is made for it."""
    command = ["nvidia-smi", "--query-gpu=index,memory.total,memory.free", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        done = subprocess.run(
            [*command, *(["-i", visible] if visible else [])], capture_output=True, text=True, timeout=30
        )
        rows = [[int(word) for word in line.split(",")] for line in done.stdout.splitlines()]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []
    return [Device(f"GPU {index}", total << 20, free << 20) for index, total, free in rows]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
