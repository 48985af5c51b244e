"""Whether a target, a draft and this machine fit together, before a weight of the target is loaded."""

import json
import os
import socket
from pathlib import Path
from typing import Any

from eyas.config.schema import TargetSettings
from eyas.drafters.common.stored import StoredDraft
from eyas.engines.info import DraftServer
from eyas.errors import UserError
from eyas.files import sha256_of_file
from eyas.layer_ids import ReadLayers
from eyas.progress import say
from eyas.targets.resolve_model import is_local, locate, locate_config
from eyas.targets.spec import as_recorded, read_outline, read_target
from eyas.targets.weights_fingerprint import way_of
from eyas.types import TargetSpec

# Of a machine's memory beyond the weights: caches, activations, the engine itself.
_OVERHEAD = 1.1


def recorded_target(stored: StoredDraft) -> dict[str, Any]:
    """Return the target as eyas' exporter recorded it; empty for a draft from elsewhere."""
    target: dict[str, Any] = stored.config.get("eyas", {}).get("target", {})
    if target:
        return target
    verifier = stored.config.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
    return {"model": verifier} if verifier else {}


def recorded_layers(stored: StoredDraft) -> ReadLayers | None:
    """Return the layers that the draft reads of its recorded target; None for a draft from elsewhere."""
    target = recorded_target(stored)
    if stored.aux_layer_ids is None or not {"architecture", "num_layers"} <= target.keys():
        return None
    return ReadLayers(tuple(stored.aux_layer_ids), target["architecture"], target["num_layers"])


def check_file(folder: Path, stored: StoredDraft) -> None:
    """Raises: UserError where the weights are not what was exported."""
    expected = stored.config.get("eyas", {}).get("weights_sha256")
    if expected and sha256_of_file(folder / "model.safetensors") != expected:
        raise UserError(
            f"{folder / 'model.safetensors'} is not what was exported: its checksum differs",
            hint="export again, or copy the folder again",
        )


def check_target(
    folder: Path, stored: StoredDraft, target: TargetSettings, print_only: bool
) -> TargetSpec | None:
    """Compare the target with what the draft was trained for: its shape first, then all of it.

    Returns None for a target of which only the shape is known: it is not here, and need not be to print.
    Raises: UserError naming what differs.
    """
    name = target.model
    outline = read_outline(locate_config(name, target.revision)[0], target)
    found = (outline.vocab_size, outline.hidden_size)
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
    like_recorded: dict[str, Any] = {"aux_layer_ids": stored.aux_layer_ids}
    if recorded:
        like_recorded["dtype"] = recorded["target"]["dtype"]
        like_recorded["fingerprint"] = way_of(recorded["target"]["weights_fingerprint"])
    target_folder = locate(name, target.revision)
    spec = read_target(target_folder, target.model_copy(update=like_recorded))
    if recorded:
        spec = as_recorded(spec, recorded["target"]["weights_fingerprint"], target_folder)
    if recorded and spec.fingerprint != recorded["target_fingerprint"]:
        before, now = recorded["target"], json.loads(json.dumps(spec.to_json()))
        key = next(k for k in before if before[k] != now[k] and k not in ("model", "revision"))
        raise UserError(
            f"{folder} was trained for another target than {name}: {key} is {before[key]} there and "
            f"{now[key]} here",
            hint=f"serve it with its own target ({before['model']}), or train a draft for this one",
        )
    return spec


def check_port(host: str, port: int) -> None:
    """Raises: UserError where nothing can listen at this address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"{host}:{port} cannot be served on: {error.strerror}",
                hint=f"stop what listens there, or choose another with --port {port + 1}",
            ) from None


def check_memory(folder: Path, server: DraftServer, engine: str) -> bool:
    """Compare the weights with the machine's memory; return whether it has only a CPU.

    Raises: UserError where they do not fit.
    """
    import torch

    weights = sum(p.stat().st_size for f in (folder, server.draft) for p in f.glob("*.safetensors"))
    needed = weights * _OVERHEAD / server.tp_size
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        room, who = float(pages), "this machine has"
    else:
        if torch.cuda.device_count() < server.tp_size:
            raise UserError(
                f"--tp-size {server.tp_size} asks for more GPUs than the {torch.cuda.device_count()} here"
            )
        room = server.gpu_memory_utilization * min(
            torch.cuda.mem_get_info(i)[1] for i in range(server.tp_size)
        )
        who = f"{engine} may use"
    if needed > room:
        raise UserError(
            f"target and draft need {needed / 2**30:.1f} GiB on each device, {who} {room / 2**30:.1f}",
            hint="raise --tp-size, or serve where there is more memory",
        )
    return on_cpu
