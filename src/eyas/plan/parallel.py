"""How many GPUs hold one copy of a target."""

from eyas.config.schema import TargetSettings
from eyas.errors import EyasError
from eyas.plan.requirements import gpu_bytes
from eyas.plan.target_size import read_target_size

# A GPU's memory where init runs on a machine without one, and the share of it that weights may take.
_USUAL_GPU_BYTES = 80e9
_WEIGHTS_SHARE = 0.7


def tensor_parallel(target: str, gpus: int) -> tuple[int, str]:
    """Return the fewest GPUs, a power of two, that hold the target's weights, and why so many."""
    try:
        size = read_target_size(TargetSettings(model=target)).weight_bytes
    except EyasError:
        return 1, "its size is not known here; more for a target that one GPU cannot hold"
    memory = gpu_bytes() or _USUAL_GPU_BYTES
    tp = 1
    while 2 * tp <= gpus and size > _WEIGHTS_SHARE * memory * tp:
        tp *= 2
    return tp, f"{size / 1e9:,.1f} GB of weights, {memory / 1e9:,.0f} GB each"
