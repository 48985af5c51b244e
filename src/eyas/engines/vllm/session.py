"""Starts and stops vLLM, and speaks of its failures in one line."""

import contextlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from eyas.engines.vllm.engine_args import Plan, engine_arguments, environment
from eyas.engines.vllm.rpc import call_all_ranks
from eyas.engines.vllm.state_transfer import (
    NAME_KEY,
    WITNESS_KEY,
    Finished,
    make_spare,
    staging_base,
)
from eyas.errors import ContractError, EyasError, UserError

_WORKER = "eyas.engines.vllm.worker.EyasWorker"
_STAGING_PREFIX = "eyas-staging-"
_VLLM_THREADS = ("MPClientEngineMonitor", "EngineCoreOutputQueueThread")
_CLEANUP_S = 10.0


class Session:
    """A vLLM that this process has started, and its staging folder."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.layer_ids = plan, plan.layer_ids
        self.num_ranks = plan.settings.tensor_parallel_size
        self.staging = make_staging(plan.settings.staging_dir, plan.settings.staging_bytes)
        make_spare(self.staging)
        self._closing = threading.Event()
        before = set(multiprocessing.active_children())
        try:
            with vllm_environment(plan):
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

    def submit(self, name: str, token_ids: Sequence[int], probe_output: bool) -> None:
        """Ask for one prompt's states, in a file called ``name``."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=1 if probe_output else None,
            ignore_eos=True,
            detokenize=False,
            extra_args={NAME_KEY: name, WITNESS_KEY: probe_output},
        )
        self.engine.add_request(name, {"prompt_token_ids": list(token_ids)}, params)

    def has_output(self) -> bool:
        """Whether ``finished`` returns at once; an engine in this process works only while it is asked."""
        return self.plan.in_process or not self.engine.engine_core.outputs_queue.empty()

    def finished(self) -> list[Finished]:
        """Let the engine work, and return the prompts that are computed; their files are on the way."""
        done = []
        for output in self.step():
            if output.finished:
                answer = output.outputs[0]
                token = answer.token_ids[0] if answer.token_ids else None
                logprob = answer.logprobs[0][token].logprob if answer.logprobs and token is not None else None
                name = str(output.request_id)
                named = self.plan.way == "worker" or output.kv_transfer_params
                path = self.staging / name if named else None
                done.append(Finished(name, path, str(answer.finish_reason), token, logprob))
        return done

    def abort(self, names: Sequence[str]) -> None:
        with contextlib.suppress(Exception):  # it may be dead already
            self.engine.abort_request(list(names))

    def nudge(self) -> None:
        """An engine in this process writes files on its next step, which nobody else makes."""
        if self.plan.in_process:
            self.step()

    def close(self) -> None:
        self._closing.set()
        llm = getattr(self, "llm", None)
        if llm is not None:
            core = llm.llm_engine.engine_core
            shut_down(core)
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


def shut_down(core: Any) -> None:
    """End vLLM, and wait for its own threads: cleaning up, they may outlive a call that finds it begun.

    A program that ends meanwhile, its sockets half closed, may never do so.
    """
    with contextlib.suppress(Exception):
        core.shutdown()
    for thread in threading.enumerate():
        if thread.name in _VLLM_THREADS:
            thread.join(_CLEANUP_S)


def make_staging(asked: Path | None, num_bytes: int) -> Path:
    """Make this process's staging folder: in memory where there is room, else in the temporary folder.

    What a killed process left there is removed.
    """
    base = asked or staging_base(num_bytes)
    try:
        base.mkdir(parents=True, exist_ok=True)
        for old in base.glob(f"{_STAGING_PREFIX}*"):
            pid = old.name.removeprefix(_STAGING_PREFIX).partition("-")[0]
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(old, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f"{_STAGING_PREFIX}{os.getpid()}-", dir=base))
    except OSError as error:
        raise UserError(
            f"cannot stage states in {base}: {error.strerror}", hint="set vllm.staging_dir to a local folder"
        ) from None


def _start(plan: Plan, staging: Path) -> Any:
    from vllm.platforms import current_platform

    arguments = engine_arguments(
        plan,
        staging,
        current_platform.is_cpu(),
        skip_tokenizer_init=True,
        worker_extension_cls=_WORKER,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    return start_llm(arguments)


def start_llm(arguments: dict[str, Any]) -> Any:
    """Return a started vLLM. Raises: EyasError with its reason."""
    from vllm import LLM

    try:
        with _interruptible():
            return LLM(**arguments)
    except Exception as error:
        hint = "its own log is above; vllm.log_level=INFO shows more of it"
        if "failed to be inspected" in str(error) and importlib.util.find_spec("torchvision") is None:
            hint = "vLLM's module for this architecture imports torchvision: install the one for this torch"
        raise EyasError(f"vLLM did not start: {first_line(error)}", hint=hint) from error


class _Interrupted(BaseException):
    pass


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end vLLM's start, which takes a KeyboardInterrupt for nothing and waits on."""

    def interrupt(number: int, frame: Any) -> None:
        try:
            before[number](number, frame)
        except KeyboardInterrupt:
            raise _Interrupted from None

    before: dict[int, Any] = {}
    try:
        try:
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, signal.SIGTERM):
                    handler = signal.getsignal(number)
                    if callable(handler):
                        before[number] = handler
                        signal.signal(number, interrupt)
            yield
        finally:
            for known, handler in before.items():
                signal.signal(known, handler)
    except _Interrupted:
        raise KeyboardInterrupt from None


@contextlib.contextmanager
def vllm_environment(plan: Plan) -> Iterator[None]:
    """vLLM's switches that exist only as environment variables, while it starts."""
    wanted = environment(plan) | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if plan.in_process else "1",
        "VLLM_LOGGING_LEVEL": plan.settings.log_level,
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }
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


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # A refused configuration says why on the line below.
    return " ".join(line.strip() for line in lines[: 2 if "validation error" in lines[0] else 1])
