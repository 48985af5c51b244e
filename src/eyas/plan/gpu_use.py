"""Which process holds which GPUs in which stage, and whether it fits: stages follow one another."""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from eyas.config.schema import RunConfig
from eyas.engines.checks import engine_of
from eyas.engines.info import EngineInfo, engine_info
from eyas.errors import UserError
from eyas.plan import estimates
from eyas.plan.estimates import PlannedDraft, Tokens
from eyas.plan.requirements import gpu_bytes, gpus_are_held, num_gpus_here
from eyas.plan.target_size import TargetSize
from eyas.registry import REFERENCE_ENGINE


@dataclass(frozen=True)
class GpuUse:
    """``bytes`` and ``available`` are of each GPU; ``trouble`` is why the stage would be refused, or None."""

    stage: str
    process: str
    num_gpus: int
    bytes: int
    available: int
    trouble: str | None = None


def gpu_use(
    config: RunConfig, target: TargetSize, tokens: Tokens, draft: PlannedDraft, num_gpus: int, size: int
) -> list[GpuUse]:
    """Return who computes on the GPUs of one machine, each of ``size`` bytes, in the order of the stages.

    What one stage starts has ended when the next begins, but for a server that a person started.
    """
    uses = []
    for stage in ("regenerate", "extract", "train", "evaluate"):
        if stage == "train":
            needed = estimates.training_memory(config, draft, target, tokens.supervised_share)
            uses.append(_use(stage, "training", config.train.num_gpus, needed, size, num_gpus))
            continue
        info = engine_of(config, stage)
        if info is None:
            continue
        needed, _ = info.memory(config, target)
        if stage == "evaluate":
            needed += estimates.export_bytes(draft, target)
            if config.evaluate.in_process and info.gpus(config):
                uses.append(_in_process(config, target, size, num_gpus))
        share = info.memory_share(config) or 1.0
        room = round(size * share)
        uses.append(_use(stage, info.title, info.gpus(config) or 1, needed, room, num_gpus))
    return uses


def planned_gpus(
    config: RunConfig,
    target: TargetSize,
    tokens: Tokens,
    draft: PlannedDraft,
    num_gpus: int | None,
    gpu_memory: float | None,
) -> tuple[list[GpuUse], str | None]:
    """Return ``gpu_use`` and ``shared_gpus`` of the machine that is meant; nothing for one without GPUs.

    Units: ``gpu_memory`` GiB of each; None: this machine's.
    """
    size = gpu_bytes(gpu_memory)
    if size is None:
        return [], None
    num = num_gpus or max(1, num_gpus_here())
    return gpu_use(config, target, tokens, draft, num, size), shared_gpus(config, num)


def shared_gpus(config: RunConfig, num_gpus: int) -> str | None:
    """Say which server of this machine holds GPUs that a later stage wants, or None."""
    endpoint, wanted = config.regenerate.endpoint, _engines_with_gpus(config)
    if not config.regenerate.enabled or endpoint is None or not wanted:
        return None
    if not _is_here(urlsplit(endpoint).hostname or "") or max(i.gpus(config) for i in wanted) < num_gpus:
        return None
    stages = " and ".join(s for s in ("extract", "evaluate") if engine_of(config, s) in wanted)
    return (
        f"the server at {endpoint} holds GPUs, and all {num_gpus} of this machine are wanted by {stages}: "
        "run eyas regenerate, stop the server, then eyas run; or leave the endpoint out and set "
        f"regenerate.engine={wanted[0].name}"
    )


def check_gpu_use(config: RunConfig, stages: Sequence[str]) -> None:
    """Raises: UserError where engines of ``stages`` want more GPUs than this machine has, or a server's.

    Without a GPU nothing is checked: the CPU build of an engine has its ranks on cores.
    """
    if not (num_gpus := num_gpus_here()):
        return
    for stage in stages:
        info = engine_of(config, stage)
        if info is not None and info.gpus(config) > num_gpus:
            raise UserError(
                f"{stage}: {info.gpus_setting}={info.gpus(config)}, and this machine has {num_gpus} GPUs",
                hint=f"set {info.gpus_setting}={num_gpus}",
            )
    why = shared_gpus(config, num_gpus) if {"regenerate", "extract"} <= set(stages) else None
    if why and gpus_are_held():
        raise UserError(why, hint="eyas plan shows which process holds which GPU")


def _in_process(config: RunConfig, target: TargetSize, size: int, num_gpus: int) -> GpuUse:
    """Return the target as evaluate loads it into its own process."""
    reference = engine_info(REFERENCE_ENGINE)
    needed, _ = reference.memory(config, target)
    use = _use("evaluate", "the target in this process", 1, needed, size, num_gpus)
    if use.trouble is None:
        return use
    return GpuUse(**vars(use) | {"trouble": f"{use.trouble}; set evaluate.in_process=false"})


def _use(stage: str, process: str, gpus: int, needed: int, room: int, num_gpus: int) -> GpuUse:
    trouble = None
    if gpus > num_gpus:
        trouble = f"it wants {gpus} GPUs, the machine has {num_gpus}"
    elif needed > room:
        trouble = f"each GPU needs {needed / 1e9:,.0f} GB and gives {room / 1e9:,.0f}"
    return GpuUse(stage, process, gpus, needed, room, trouble)


def _engines_with_gpus(config: RunConfig) -> list[EngineInfo]:
    found = [engine_of(config, stage) for stage in ("extract", "evaluate")]
    return [info for info in found if info is not None and info.gpus(config)]


def _is_here(host: str) -> bool:
    """Whether a host's name or address is this machine's own, as far as it shows."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified
