"""doctor: what would stop a run, looked for before it starts; each finding with its remedy."""

import importlib.util
import platform
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil

from eyas.config.load import LoadedConfig
from eyas.config.schema import RunConfig
from eyas.errors import EyasError

State = Literal["ok", "warning", "problem"]
_SMALL_DISK = 10 << 30
_SMALL_MEMORY = 4 << 30
# vLLM's own server is tried here when no endpoint is configured.
_USUAL_PORT = 8000
INSTALL_VLLM = "pip install 'eyas[vllm]', or set extract.engine=transformers"


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and how to mend it where it is not well."""

    subject: str
    state: State
    text: str
    remedy: str | None = None


def examine(loaded: LoadedConfig | None) -> list[Finding]:
    """Look at the machine, and with a configuration at the run's target, folders and servers."""
    config = loaded.config if loaded else None
    checks: list[Callable[[RunConfig | None], Iterator[Finding]]] = [
        _python, _packages, _cuda, _vllm, _ray, _trackers, _memory, _disk, _ports,
    ]  # fmt: skip
    found = [finding for check in checks for finding in check(config)]
    return [*found, *_target(loaded)] if loaded else found


def print_findings(findings: list[Finding]) -> None:
    """Print a line for each finding on stdout, and how many are not well."""
    for finding in findings:
        print(f"{finding.state:<8} {finding.subject:<12} {finding.text}")
        if finding.remedy:
            print(f"{'':<22}{finding.remedy}")
    problems, warnings = (sum(f.state == s for f in findings) for s in ("problem", "warning"))
    print(f"\n{problems} problems, {warnings} warnings")


def _python(config: RunConfig | None) -> Iterator[Finding]:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("python", "ok", text)
    if platform.system() != "Linux":
        yield Finding("system", "warning", f"{platform.system()} is not tested", "Linux is")


def _packages(config: RunConfig | None) -> Iterator[Finding]:
    for name, least in (("torch", "2.7"), ("transformers", "5.0"), ("safetensors", "0.5"), ("pyarrow", "16")):
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding(name, "problem", "is not installed", "pip install eyas installs what it needs")
            continue
        if _numbers(found) < _numbers(least):
            yield Finding(name, "problem", f"{found} is too old", f"pip install '{name}>={least}'")
        else:
            yield Finding(name, "ok", found)


def _cuda(config: RunConfig | None) -> Iterator[Finding]:
    try:
        import torch
    except ImportError:  # _packages says so
        return
    wants = config is not None and config.train.device.startswith("cuda")
    if not torch.cuda.is_available():
        built, driver = torch.version.cuda, Path("/proc/driver/nvidia/version").exists()
        if driver and built is None:
            yield Finding("cuda", "problem", "there is a GPU driver, but torch is a CPU build",
                          "install torch for your CUDA version: https://pytorch.org/get-started")  # fmt: skip
        elif driver:
            yield Finding("cuda", "problem", f"torch for CUDA {built} finds no usable GPU",
                          "update the driver (see nvidia-smi), or mind CUDA_VISIBLE_DEVICES")  # fmt: skip
        elif wants:
            yield Finding(
                "cuda", "problem", "train.device=cuda, and there is no GPU", "set train.device=auto"
            )
        else:
            yield Finding("cuda", "warning", "no GPU: small targets only", "fine for the demo and for trying")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        text = f"{properties.name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        if free < total / 2:
            yield Finding(f"gpu {index}", "warning", text, "another process uses it: nvidia-smi")
        else:
            yield Finding(f"gpu {index}", "ok", text)
    if config and config.vllm.tensor_parallel_size > torch.cuda.device_count():
        yield Finding("gpus", "problem", f"vllm.tensor_parallel_size={config.vllm.tensor_parallel_size}, "
                      f"and there are {torch.cuda.device_count()} GPUs", "lower it")  # fmt: skip


def _vllm(config: RunConfig | None) -> Iterator[Finding]:
    wanted = config is not None and "vllm" in (config.extract.engine, config.regenerate.engine)
    if importlib.util.find_spec("vllm") is None:
        yield Finding("vllm", "problem" if wanted else "ok",
                      "is not installed" + ("" if wanted else " (needed for large targets only)"),
                      INSTALL_VLLM if wanted else None)  # fmt: skip
        return
    from eyas.engines.vllm.versions import DEPENDABLE, INSTALL, installed_version, remarks

    try:
        number = installed_version()
    except EyasError as error:
        yield Finding("vllm", "problem" if wanted else "warning", error.what, error.hint)
        return
    text = ".".join(map(str, number))
    if found := remarks(number):
        yield Finding("vllm", "warning", f"{text} {'; '.join(found)}", INSTALL)
    elif number < DEPENDABLE:
        yield Finding("vllm", "warning", f"{text} works; newer is dependable", INSTALL)
    else:
        yield Finding("vllm", "ok", text)


def _ray(config: RunConfig | None) -> Iterator[Finding]:
    try:
        yield Finding("ray", "ok", version("ray"))
    except PackageNotFoundError:
        yield Finding("ray", "ok", "is not installed (needed on a cluster only)")


def _trackers(config: RunConfig | None) -> Iterator[Finding]:
    for name in config.train.trackers if config else ():
        if importlib.util.find_spec(name) is None:
            yield Finding(name, "problem", "is not installed, and train.trackers names it",
                          "pip install 'eyas[trackers]'")  # fmt: skip
        else:
            yield Finding(name, "ok", "is installed")


def _memory(config: RunConfig | None) -> Iterator[Finding]:
    free = psutil.virtual_memory().available
    text = f"{free / 2**30:.1f} GiB available"
    if free < _SMALL_MEMORY:
        yield Finding("memory", "warning", text, "end other programs; eyas plan says what the run needs")
    else:
        yield Finding("memory", "ok", text)


def _disk(config: RunConfig | None) -> Iterator[Finding]:
    wanted = config.run_dir if config else Path()
    folder = wanted.absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        probe = folder / f".eyas-doctor-{uuid.uuid4().hex[:8]}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        yield Finding("run folder", "problem", f"{folder} cannot be written: {error.strerror}",
                      "choose another run_dir, or mend its permissions")  # fmt: skip
    else:
        yield Finding("run folder", "ok", f"{wanted.absolute()} can be written")
    free = shutil.disk_usage(folder).free
    text = f"{free / 1e9:,.0f} GB free at {folder}"
    state: State = "warning" if free < _SMALL_DISK else "ok"
    yield Finding("disk", state, text, "hidden states are large: see eyas plan" if state != "ok" else None)
    if config and config.extract.engine == "vllm" and config.vllm.staging_dir is None:
        shm = Path("/dev/shm")
        room = shutil.disk_usage(shm).free if shm.is_dir() else 0
        if room < config.vllm.staging_bytes:
            yield Finding("staging", "warning", f"/dev/shm has {room / 1e9:.1f} GB free, less than "
                          "vllm.staging_bytes", "states go through a folder on disk instead; in a container "
                          "give --shm-size")  # fmt: skip


def _ports(config: RunConfig | None) -> Iterator[Finding]:
    endpoint = config.regenerate.endpoint if config else None
    if endpoint:
        parts = urlsplit(endpoint)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        if _answers(host, port):
            yield Finding("endpoint", "ok", f"{host}:{port} answers")
        else:
            yield Finding(
                "endpoint", "problem", f"nothing listens at {host}:{port}", "start the server first"
            )
    elif _answers("127.0.0.1", _USUAL_PORT):
        yield Finding("port", "warning", f"{_USUAL_PORT} is in use", "a server of yours needs another --port")
    else:
        yield Finding("port", "ok", f"{_USUAL_PORT} is free")


def _target(loaded: LoadedConfig) -> Iterator[Finding]:
    from eyas.plan.target_size import read_target_size
    from eyas.stages.check_settings import check_settings
    from eyas.stages.run_context import RunContext

    context = RunContext(loaded)
    try:
        shape = read_target_size(loaded.config.target, context.default_aux_layer_ids)
    except EyasError as error:
        yield Finding("target", "problem", error.what, error.hint)
        return
    text = f"{shape.spec.architecture}, {shape.spec.num_layers} layers, {shape.weight_bytes / 1e9:,.1f} GB"
    if shape.trouble:
        yield Finding("target", "problem", shape.trouble, "run eyas config to see which setting names it")
        return
    yield Finding("target", "ok", text)
    tokenizer = context.tokenizer
    yield Finding(
        "tokenizer", "ok", f"{len(tokenizer):,} ids, ends an answer with {shape.spec.eos_token_ids}"
    )
    yield Finding("template", "ok", f"{len(str(tokenizer.chat_template)):,} characters, fingerprint "
                  f"{shape.spec.template_fingerprint}")  # fmt: skip
    try:
        check_settings(context)
    except EyasError as error:
        yield Finding("settings", "problem", error.what, error.hint)
    else:
        yield Finding("settings", "ok", "every stage would accept them")


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False


def _numbers(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split("+")[0].split(".")[:2]:
        digits = "".join(c for c in part if c.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers)
