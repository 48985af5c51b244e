"""serve: start vLLM with a draft, after checking that target, draft, engine and machine fit together.

All checks are done before a weight of the target is loaded.
"""

import json
import os
import shlex
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eyas import registry
from eyas.config.schema import TargetSettings
from eyas.config.secrets import without_secrets
from eyas.drafters.common.stored import StoredDraft
from eyas.drafters.serving import sglang_trouble, vllm_file
from eyas.errors import UserError
from eyas.export.read import read_draft
from eyas.files import sha256_of_file
from eyas.progress import say
from eyas.targets.resolve_model import is_local, locate, locate_config
from eyas.targets.spec import read_target
from eyas.types import TargetSpec

# Of a machine's memory beside the weights: caches, activations, the engine itself.
_OVERHEAD = 1.1


@dataclass(frozen=True)
class ServeOptions:
    """``target`` None: the one the draft was trained for. ``extra`` words go to the engine as they are."""

    draft: Path
    target: str | None = None
    engine: Literal["vllm", "sglang"] = "vllm"
    num_draft_tokens: int = 3
    host: str = "127.0.0.1"
    port: int = 8000
    tp_size: int = 1
    gpu_memory_utilization: float = 0.9
    dtype: str | None = None
    extra: tuple[str, ...] = ()


def serve(options: ServeOptions, print_only: bool) -> None:
    """Check everything, then become the engine; or print the command that would.

    Raises: UserError naming the first thing that does not fit.
    """
    stored = read_draft(options.draft)
    _check_file(options.draft, stored)
    name = options.target or _recorded(stored).get("model")
    if name is None:
        raise UserError(
            f"{options.draft} does not say which target it was trained for", hint="name it with --target"
        )
    spec = _check_target(options.draft, stored, str(name), print_only)
    trouble = sglang_trouble(stored.architecture, stored.shape) if options.engine == "sglang" else None
    if trouble:
        raise UserError(trouble, hint="serve it with vLLM: leave --engine out")
    if print_only:
        print(shlex.join(command(options, stored, str(name), on_cpu=False)))
        return
    if options.engine == "sglang":
        raise UserError("eyas starts vLLM only", hint="add --print, and run the command where SGLang is")
    from eyas.engines.vllm.versions import check_draft_support, check_parallel

    assert spec is not None
    check_draft_support(spec, vllm_file(stored.architecture))
    check_parallel(spec, options.tp_size)
    _check_port(options.host, options.port)
    folder = locate(str(name))
    on_cpu = _check_memory(folder, options)
    words = command(options, stored, str(folder), on_cpu)
    say(f"serve: {shlex.join(without_secrets(words))}")
    if on_cpu:
        words[0] = sys.executable
    os.execvp(words[0], words)


def command(options: ServeOptions, stored: StoredDraft, target: str, on_cpu: bool) -> list[str]:
    """Return the words that start the engine."""
    draft, k = str(options.draft.resolve()), options.num_draft_tokens
    dtype = options.dtype or _recorded(stored).get("dtype") or "auto"
    where = ["--host", options.host, "--port", str(options.port)]
    if options.engine == "sglang":
        return [
            *("python", "-m", "sglang.launch_server", "--model-path", target, "--dtype", dtype),
            *registry.drafter_file(stored.architecture, "sglang").arguments(draft, k),
            *(("--tp", str(options.tp_size)) if options.tp_size > 1 else ()),
            *("--mem-fraction-static", str(options.gpu_memory_utilization)),
            *("--enable-metrics", *where, *options.extra),
        ]
    config = json.dumps(vllm_file(stored.architecture).speculative_config(draft, k))
    # The CPU build's server does not start by the short name: its distribution is not called vllm.
    short = ["vllm", "serve", target]
    start = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", target] if on_cpu else short
    memory = () if on_cpu else ("--gpu-memory-utilization", str(options.gpu_memory_utilization))
    return [
        *(*start, "--dtype", dtype, "--speculative-config", config),
        *(("--tensor-parallel-size", str(options.tp_size)) if options.tp_size > 1 else ()),
        *(*memory, *where, *options.extra),
    ]


def _recorded(stored: StoredDraft) -> dict[str, Any]:
    """Return the target as eyas' exporter recorded it; empty for a draft from elsewhere."""
    target: dict[str, Any] = stored.config.get("eyas", {}).get("target", {})
    if target:
        return target
    verifier = stored.config.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
    return {"model": verifier} if verifier else {}


def _check_file(folder: Path, stored: StoredDraft) -> None:
    expected = stored.config.get("eyas", {}).get("weights_sha256")
    if expected and sha256_of_file(folder / "model.safetensors") != expected:
        raise UserError(
            f"{folder / 'model.safetensors'} is not what was exported: its checksum differs",
            hint="export again, or copy the folder again",
        )


def _check_target(folder: Path, stored: StoredDraft, name: str, print_only: bool) -> TargetSpec | None:
    """Compare the target with what the draft was trained for: its shape first, then all of it.

    Returns None for a target that only its shape is known of: it is not here, and need not be to print.
    """
    text = locate_config(name)
    text = text.get("text_config") or text
    found = (text.get("vocab_size"), text.get("hidden_size"))
    shape = stored.shape
    if found != (shape.target_vocab_size, shape.target_hidden_size):
        raise UserError(
            f"{folder} is a draft for a target of {shape.target_vocab_size} ids and width "
            f"{shape.target_hidden_size}; {name} has {found[0]} and {found[1]}",
            hint="name the target that it was trained for with --target",
        )
    recorded = stored.config.get("eyas", {})
    if print_only and not is_local(name):
        say(f"serve: {name} is not on this machine; only its shape was compared")
        return None
    settings = TargetSettings(
        model=name,
        dtype=recorded["target"]["dtype"] if recorded else "auto",
        aux_layer_ids=stored.aux_layer_ids,
    )
    spec = read_target(locate(name), settings)
    if recorded and spec.fingerprint != recorded["target_fingerprint"]:
        before, now = recorded["target"], json.loads(json.dumps(spec.to_json()))
        key = next(k for k in before if before[k] != now[k] and k not in ("model", "revision"))
        raise UserError(
            f"{folder} was trained for another target than {name}: {key} is {before[key]} there and "
            f"{now[key]} here",
            hint=f"serve it with its own target ({before['model']}), or train a draft for this one",
        )
    return spec


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"{host}:{port} cannot be served on: {error.strerror}",
                hint=f"stop what listens there, or choose another with --port {port + 1}",
            ) from None


def _check_memory(folder: Path, options: ServeOptions) -> bool:
    """Compare the weights with the machine's memory; return whether it has only a CPU."""
    import torch

    weights = sum(p.stat().st_size for f in (folder, options.draft) for p in f.glob("*.safetensors"))
    needed = weights * _OVERHEAD / options.tp_size
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        room, place = float(pages), "this machine has"
    else:
        if torch.cuda.device_count() < options.tp_size:
            raise UserError(
                f"--tp-size {options.tp_size} asks for more GPUs than the {torch.cuda.device_count()} here"
            )
        room = options.gpu_memory_utilization * min(
            torch.cuda.mem_get_info(i)[1] for i in range(options.tp_size)
        )
        place = "vLLM may use"
    if needed > room:
        raise UserError(
            f"target and draft need {needed / 2**30:.1f} GiB on each device, {place} {room / 2**30:.1f}",
            hint="raise --tp-size, or serve where there is more memory",
        )
    return on_cpu
