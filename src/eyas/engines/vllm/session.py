"""Starts and stops vLLM, and speaks of its failures in one line."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eyas.config.schema import VllmSettings
from eyas.engines.vllm.rpc import call_all_ranks
from eyas.engines.vllm.versions import Way
from eyas.errors import ContractError, EyasError, UserError
from eyas.types import TargetSpec

_WORKER = "eyas.engines.vllm.worker.EyasWorker"
_CONNECTOR = "eyas.engines.vllm.connector"
_STAGING_PREFIX = "eyas-staging-"


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
    in_process: bool
    way: Way | None  # None: it generates only

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers captured, ascending, each once: vLLM returns them so whatever it is asked for."""
        return tuple(sorted({*self.spec.aux_layer_ids, self.spec.num_layers}))

    @property
    def bytes_per_token(self) -> int:
        itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}[self.spec.dtype]
        return len(self.layer_ids) * self.spec.hidden_size * itemsize


class Session:
    """A running vLLM and its staging folder."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.num_ranks = plan.settings.tensor_parallel_size
        self.staging = make_staging(plan.settings.staging_dir, plan.settings.staging_bytes)
        self._closing = threading.Event()
        before = set(multiprocessing.active_children())
        try:
            with environment(plan):
                self.llm = _start(plan, self.staging)
                self.engine: Any = self.llm.llm_engine
            processes = set(multiprocessing.active_children()) - before
            if processes:
                watch(self.engine.engine_core, processes, self._closing)
            self._check_model()
            if plan.way == "worker":
                arguments = (plan.spec.num_layers, list(plan.layer_ids), str(self.staging))
                call_all_ranks(self.llm, self.num_ranks, int, "install_hooks", *arguments)
        except BaseException:
            self.close()
            raise

    def step(self) -> list[Any]:
        """Let the engine work, and return the requests that gave output. Raises: EyasError."""
        try:
            return list(self.engine.step())
        except Exception as error:
            raise EyasError(
                f"vLLM stopped: {first_line(error)}",
                hint="complete shards are kept: run the same command again; its log is above",
            ) from error

    def close(self) -> None:
        self._closing.set()
        llm = getattr(self, "llm", None)
        if llm is not None:
            core = llm.llm_engine.engine_core
            with contextlib.suppress(Exception):
                core.shutdown()
            self.engine = self.llm = None
            if self.plan.in_process:
                from vllm.distributed import cleanup_dist_env_and_memory

                cleanup_dist_env_and_memory()
        shutil.rmtree(self.staging, ignore_errors=True)

    def _check_model(self) -> None:
        spec = self.plan.spec
        wanted = {"num_layers": spec.num_layers, "hidden_size": spec.hidden_size, "dtype": spec.dtype}
        for rank, found in enumerate(call_all_ranks(self.llm, self.num_ranks, dict, "describe")):
            for key, value in wanted.items():
                if found[key] != value:
                    raise ContractError(
                        f"vLLM's rank {rank} has loaded a model with {key} {found[key]}, expected {value}"
                    )


def watch(core: Any, processes: set[Any], closing: threading.Event) -> None:
    """Wake a waiting ``step`` when an engine process dies: vLLM notes it and waits on for ever."""

    def wait() -> None:
        while not closing.is_set():
            if multiprocessing.connection.wait([p.sentinel for p in processes], timeout=0.5):
                if not closing.is_set():
                    core.outputs_queue.put_nowait(RuntimeError("an engine process has ended"))
                return

    threading.Thread(target=wait, daemon=True).start()


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


def make_staging(asked: Path | None, num_bytes: int) -> Path:
    """Make this process's staging folder: in memory where there is room, else in the temporary folder.

    What a killed process left there is removed.
    """
    shm = Path("/dev/shm")
    roomy = shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 2 * num_bytes
    base = asked or (shm if roomy else Path(tempfile.gettempdir()))
    try:
        base.mkdir(parents=True, exist_ok=True)
        for old in base.glob(f"{_STAGING_PREFIX}*"):
            pid = old.name.removeprefix(_STAGING_PREFIX).partition("-")[0]
            if pid.isdigit() and not _is_running(int(pid)):
                shutil.rmtree(old, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f"{_STAGING_PREFIX}{os.getpid()}-", dir=base))
    except OSError as error:
        raise UserError(
            f"cannot stage states in {base}: {error.strerror}", hint="set vllm.staging_dir to a local folder"
        ) from None


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _start(plan: Plan, staging: Path) -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": str(plan.folder),
        "skip_tokenizer_init": True,
        "trust_remote_code": plan.trust_remote_code,
        "dtype": plan.spec.dtype,
        "seed": 0,
        "generation_config": "vllm",  # no sampling settings from the model folder
        "max_model_len": plan.max_model_len,
        "max_num_batched_tokens": max(plan.batch_tokens, plan.batch_size),
        "max_num_seqs": plan.batch_size,
        "tensor_parallel_size": plan.settings.tensor_parallel_size,
        "enforce_eager": on_cpu or plan.way == "worker",
        "worker_extension_cls": _WORKER,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if plan.settings.kv_cache_bytes or on_cpu:
        arguments["kv_cache_memory_bytes"] = plan.settings.kv_cache_bytes or _kv_cache_bytes(plan)
    else:
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
            },
        }
    # Off unless asked for: with it, some versions lose the rows of a prefix they have seen (vllm#44485).
    arguments |= {"enable_prefix_caching": False} | further_arguments(plan.settings.engine_args, arguments)
    try:
        return LLM(**arguments)
    except Exception as error:
        raise EyasError(
            f"vLLM did not start: {first_line(error)}",
            hint="its own log is above; vllm.log_level=INFO shows more of it",
        ) from error


def _kv_cache_bytes(plan: Plan) -> int:
    """On a CPU the cache is sized by us: some batches of tokens, never less than the longest sample."""
    spec = plan.spec
    itemsize = 4 if spec.dtype == "float32" else 2
    cache = 2 * spec.num_layers * spec.num_key_value_heads * spec.head_dim * itemsize
    per_token = cache + (plan.bytes_per_token if plan.way == "native" else 0)
    num_tokens = max(2 * plan.batch_tokens, 2 * plan.max_model_len, 4096)
    # The groups of layers are padded to pages of one size, hence twice what would do.
    return max(2 * num_tokens * per_token, 64 << 20)


@contextlib.contextmanager
def environment(plan: Plan) -> Iterator[None]:
    """vLLM's switches that exist only as environment variables, while it starts."""
    ranks = plan.settings.tensor_parallel_size
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if plan.in_process else "1",
        "VLLM_LOGGING_LEVEL": plan.settings.log_level,
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if plan.max_model_len > plan.spec.max_position_embeddings:
        # One position beyond the last sample's: it is never computed, but vLLM counts it.
        wanted["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    if plan.way == "worker":
        wanted["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the V2 runner keeps no input_batch to match rows by
    if ranks > 1 and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = _cores_of_ranks(ranks)
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _cores_of_ranks(ranks: int) -> str:
    """Give each rank its share of the cores, as vLLM's CPU build wants it: ``0,1|2,3``."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::ranks] or [cores[rank % len(cores)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
