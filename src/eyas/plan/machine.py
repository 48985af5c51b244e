"""What would stop a run on this machine: packages, devices, memory, disk, ports, servers."""

import importlib.util
import platform
import shutil
import socket
import uuid
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from eyas.config.schema import RunConfig
from eyas.engines.checks import engines_of
from eyas.engines.info import EngineInfo, engine_info
from eyas.errors import UserError
from eyas.findings import Finding, State
from eyas.registry import ENGINES

_SMALL_DISK = 10 << 30
_SMALL_MEMORY = 4 << 30
# An engine's server is tried here when no endpoint is configured.
_USUAL_PORT = 8000


def machine_findings(config: RunConfig | None) -> Iterator[Finding]:
    """Look at this machine, for the run of ``config`` if there is one."""
    for look in (_python, _packages, _cuda, _engines, _ray, _trackers, _memory, _disk, _ports):
        yield from look(config)


def _python(config: RunConfig | None) -> Iterator[Finding]:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("python", "ok", text)
    if platform.system() != "Linux":
        yield Finding("system", "warning", f"{platform.system()} is not tested", "Linux is")


# As in pyproject.toml; torch.optim.Muon is new in torch 2.9.
LOWEST = {"torch": "2.9", "transformers": "5.0", "safetensors": "0.5", "pyarrow": "16"}


def _packages(config: RunConfig | None) -> Iterator[Finding]:
    for name, least in LOWEST.items():
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
    if config is None:
        return
    for info in _used(config):
        if info.gpus(config) > torch.cuda.device_count():
            yield Finding("gpus", "problem", f"{info.gpus_setting}={info.gpus(config)}, and there are "
                          f"{torch.cuda.device_count()} GPUs", "lower it")  # fmt: skip


def _engines(config: RunConfig | None) -> Iterator[Finding]:
    used = _used(config) if config else []
    for info in map(engine_info, sorted(ENGINES)):
        yield from info.findings(config, info in used)


def _used(config: RunConfig) -> list[EngineInfo]:
    """Return the engines that the run starts here; none where a name is wrong, which its own finding says."""
    try:
        return engines_of(config)
    except UserError:
        return []


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
