"""What vLLM is started with, whether in this process's hands or as a server."""

import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eyas.config.schema import VllmSettings
from eyas.engines.vllm.versions import (
    CPU_CACHE_SIZED,
    HYBRID,
    LANGUAGE_MODEL_ONLY,
    Way,
    installed_version,
    is_cpu_build,
    is_older,
)
from eyas.errors import UserError
from eyas.types import TargetSpec

_SMALL_MACHINE = 4  # cores
_LEAST_CACHE, _LEAST_HYBRID_CACHE = 64 << 20, 512 << 20
_WRAPPER = "ForConditionalGeneration"  # a text model among other modalities
_CONNECTOR = "eyas.engines.vllm.connector"


@dataclass(frozen=True)
class Plan:
    """What one vLLM is started for."""

    folder: Path
    spec: TargetSpec
    settings: VllmSettings
    max_model_len: int
    batch_tokens: int
    batch_size: int
    trust_remote_code: bool
    way: Way | None  # None: it generates only
    in_process: bool = False

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return captured_layers(self.spec)

    @property
    def bytes_per_token(self) -> int:
        itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}[self.spec.dtype]
        return len(self.layer_ids) * self.spec.hidden_size * itemsize


def captured_layers(spec: TargetSpec) -> tuple[int, ...]:
    """Return the layers captured, ascending, each once: vLLM returns them so whatever it is asked for."""
    return tuple(sorted({*spec.aux_layer_ids, spec.num_layers}))


def engine_arguments(plan: Plan, staging: Path, on_cpu: bool, **own: Any) -> dict[str, Any]:
    """Return vLLM's own arguments, ``own`` among them; states go to ``staging``."""
    arguments: dict[str, Any] = {
        "model": str(plan.folder),
        "trust_remote_code": plan.trust_remote_code,
        "dtype": plan.spec.dtype,
        "seed": 0,
        "generation_config": "vllm",  # no sampling settings from the model folder
        "max_model_len": plan.max_model_len,
        "max_num_batched_tokens": max(plan.batch_tokens, plan.batch_size),
        "max_num_seqs": plan.batch_size,
        "tensor_parallel_size": plan.settings.tensor_parallel_size,
        "enforce_eager": on_cpu or plan.way == "worker",
        **own,
    }
    if plan.spec.architecture.endswith(_WRAPPER) and not is_older(LANGUAGE_MODEL_ONLY):
        # The processor of pictures would want a tokenizer, and the vision tower memory.
        arguments["language_model_only"] = True
    if plan.settings.kv_cache_bytes or on_cpu:
        arguments["kv_cache_memory_bytes"] = cache_bytes(plan)
    if not on_cpu:  # asked for at the start even where the cache has a size of its own
        arguments["gpu_memory_utilization"] = plan.settings.gpu_memory_utilization
    if plan.way == "native":
        config = {"eagle_aux_hidden_state_layer_ids": list(plan.layer_ids)}
        arguments["speculative_config"] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": config},
        }
        arguments["kv_transfer_config"] = {
            "kv_connector": "EyasConnector",
            "kv_connector_module_path": _CONNECTOR,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "shared_storage_path": str(staging),
                "use_synchronization_lock": False,
                "target": plan.spec.weights_fingerprint,
            },
        }
    # Off unless asked for: with it, some versions lose the rows of a prefix they have seen (vllm#44485).
    return (
        arguments | {"enable_prefix_caching": False} | further_arguments(plan.settings.engine_args, arguments)
    )


def environment(plan: Plan) -> dict[str, str]:
    """Return vLLM's switches that exist only as environment variables."""
    ranks = plan.settings.tensor_parallel_size
    wanted = {}
    if plan.max_model_len > plan.spec.max_position_embeddings:
        # One position beyond the last sample's: it is never computed, but vLLM counts it.
        wanted["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    if plan.way == "worker":
        wanted["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the V2 runner keeps no input_batch to match rows by
    if not is_cpu_build() and "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ:
        # A forked process cannot use CUDA once this one has asked for GPUs, and vLLM does not always notice.
        wanted["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if plan.spec.dtype == "float32" and "TRITON_F32_DEFAULT" not in os.environ:
        wanted["TRITON_F32_DEFAULT"] = "ieee"  # by itself Triton multiplies float32 with ten bits (TF32)
    if is_cpu_build() and installed_version() < CPU_CACHE_SIZED:
        num_bytes = cache_bytes(plan)
        wanted["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(num_bytes / (1 << 30)))  # whole GiB
    chosen = {"VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"} & os.environ.keys()
    # It keeps a core for itself, or with a connector none: half of a small machine more or less.
    small = len(os.sched_getaffinity(0)) <= _SMALL_MACHINE and not chosen
    if small or (ranks > 1 and "VLLM_CPU_OMP_THREADS_BIND" not in chosen):
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = _cores_of_ranks(ranks)
    return wanted


def serve_command(plan: Plan, staging: Path, *, on_cpu: bool, host: str, port: int) -> list[str]:
    """Return the words that start a server which captures as ``plan`` says."""
    # The CPU build's server does not start by the short name: its distribution is not called vllm.
    start = ["python", "-m", "vllm.entrypoints.openai.api_server"] if on_cpu else ["vllm", "serve"]
    arguments = engine_arguments(plan, staging, on_cpu)
    folder = str(arguments.pop("model"))
    words = [*start, *(["--model", folder] if on_cpu else [folder]), "--host", host, "--port", str(port)]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is False and name in ("trust_remote_code", "enforce_eager"):
            continue  # as it is anyway
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


def as_shell(words: list[str], variables: Mapping[str, str]) -> str:
    """Write a command as a shell takes it, one flag a line."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return "".join(f"{k}={shlex.quote(v)} " for k, v in variables.items()) + " \\\n    ".join(lines)


def further_arguments(words: tuple[str, ...], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``name=value`` words, values as in YAML.

    Raises: UserError for another form, or an argument that eyas sets itself.
    """
    out: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"cannot read {word!r} in vllm.engine_args", hint="each is name=value")
        if name in ours:
            raise UserError(
                f"vllm.engine_args may not set {name}: eyas sets it itself",
                hint="eyas config --keys lists the settings that do",
            )
        out[name] = yaml.safe_load(text)
    return out


def cache_bytes(plan: Plan) -> int:
    """Return the size of the cache where we choose it, as on a CPU.

    By default room for some batches of tokens, never for less than the longest sample.
    """
    if plan.settings.kv_cache_bytes:
        return plan.settings.kv_cache_bytes
    spec = plan.spec
    itemsize = 4 if spec.dtype == "float32" else 2
    cache = 2 * spec.num_layers * spec.num_key_value_heads * spec.head_dim * itemsize
    per_token = cache + (plan.bytes_per_token if plan.way == "native" else 0)
    num_tokens = max(2 * plan.batch_tokens, 2 * plan.max_model_len, 4096)
    # The groups of layers are padded to pages of one size, hence twice what would do. A running state of a
    # layer takes a whole page.
    least = _LEAST_HYBRID_CACHE if spec.architecture in HYBRID else _LEAST_CACHE
    return max(2 * num_tokens * per_token, least)


def _cores_of_ranks(ranks: int) -> str:
    """Give each rank its share of the cores, as vLLM's CPU build wants it: ``0,1|2,3``."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::ranks] or [cores[rank % len(cores)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)
