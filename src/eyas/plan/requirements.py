"""What a run needs of disk and memory, compared with what this machine has."""

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from eyas.config.schema import RunConfig
from eyas.engines.info import engine_info
from eyas.plan import estimates
from eyas.plan.estimates import PlannedDraft, Tokens
from eyas.plan.target_size import TargetSize
from eyas.run_folder import FOLDERS


@dataclass(frozen=True)
class Need:
    """Something that a run needs, and what is available of it (None: unknown)."""

    what: str
    bytes: int
    available: int | None
    basis: str

    @property
    def fits(self) -> bool | None:
        return None if self.available is None else self.bytes <= self.available


def disk_needs(
    config: RunConfig, shape: TargetSize, tokens: Tokens, draft: PlannedDraft, states: Mapping[str, str]
) -> list[Need]:
    """Return what the stages that are not done will write; ``states`` says how far each stage is."""
    folder = config.run_dir
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    train = config.train
    is_stored = train.source == "store" or train.keep_states
    stored = tokens if is_stored else dataclasses.replace(tokens, train=0.0)
    parts = {
        "extract": (estimates.state_bytes(shape, stored), "hidden states"),
        "train": (
            estimates.checkpoint_bytes(draft, train.optimizer),
            "checkpoints: last, best, and one being written",
        ),
        "export": (estimates.export_bytes(draft, shape), "the exported draft"),
    }
    needs = [Need(what, size, None, FOLDERS[s]) for s, (size, what) in parts.items() if states[s] != "done"]
    total = sum(n.bytes for n in needs)
    return [*needs, Need("disk in all", total, free, f"free at {folder}")]


def memory_needs(
    config: RunConfig, shape: TargetSize, tokens: Tokens, draft: PlannedDraft, gpu_memory: float | None
) -> list[Need]:
    """Return what the engine and the trainer need; ``gpu_memory`` is in GiB, None: this machine's."""
    gpus = gpu_bytes(gpu_memory)
    ram = int(psutil.virtual_memory().available)
    place = gpus if gpus is not None else ram
    info = engine_info(config.extract.engine)
    kind = "a GPU" if gpus is not None or info.gpus(config) else "memory"
    engine, what = info.memory(config, shape)
    reserved = info.memory_share(config)
    share = reserved or 1.0
    has = None if place is None or (kind == "a GPU" and gpus is None) else round(place * share)
    training = estimates.training_memory(config, draft, shape, tokens.supervised_share)
    on_gpu = config.train.device != "cpu" and gpus is not None
    room, basis = gpus if on_gpu else ram, "draft, optimizer, the target's embedding and head, one batch"
    if config.train.shard and config.train.num_gpus > 1:
        basis += f"; optimizer and fp32 weights in slices over {config.train.num_gpus} GPUs"
    turns = []
    if config.train.source == "stream":
        turns = [Need("train, memory", config.train.stream_bytes, ram, "states on their way, at most")]
    if turns and config.extract.fleet is None:
        basis += "; the engine next to them"
        if not reserved:
            training += engine
        elif room is not None:
            room = round(room * (1 - reserved))
    return [
        Need(f"extract, {kind}", engine, has, what),
        Need("train, a GPU" if on_gpu else "train, memory", training, room, basis),
        *turns,
    ]


def num_gpus_here() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpus_are_held() -> bool:
    """Whether another process has more than half of the memory of a GPU."""
    import torch

    return any(2 * free < total for free, total in map(torch.cuda.mem_get_info, range(num_gpus_here())))


def gpu_bytes(asked: float | None = None) -> int | None:
    """Return the memory of a GPU: ``asked`` GiB, else that of this machine's, or None without one."""
    import torch

    if asked:
        return round(asked * 2**30)
    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None
