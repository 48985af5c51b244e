"""Figures of every row of captured states, taken where the states lie: in a GPU's memory at best."""

import threading

import torch

# Places in the last dimension of what ``measure_rows`` returns.
LOW, HIGH, TOTAL, NORM = range(4)

_BLOCK = 1 << 20  # values measured at a time on a CPU: smaller ones take the interpreter's lock more often
_kept = threading.local()


def measure_rows(states_TLD: torch.Tensor) -> torch.Tensor:
    """Return the least and largest value, sum and norm of each row, [T, L, 4] in float32.

    NaN anywhere in a row shows in all four, an infinity in the norm.
    """
    if states_TLD.is_cuda:
        parts = (
            states_TLD.amin(-1).float(),
            states_TLD.amax(-1).float(),
            states_TLD.sum(-1, dtype=torch.float32),
            torch.linalg.vector_norm(states_TLD, dim=-1, dtype=torch.float32),
        )
        return torch.stack(parts, dim=-1)
    num_tokens, num_layers, width = states_TLD.shape
    figures = torch.empty(4, num_tokens, num_layers)
    # Block by block in float32: half floats reduce twenty times slower, and a block stays in the cache.
    rows = max(1, _BLOCK // max(1, num_layers * width))
    space = _space_of_thread(rows * num_layers * width)
    for states, (low, high, total, norm) in zip(
        states_TLD.split(rows), zip(*(part.split(rows) for part in figures), strict=True), strict=True
    ):
        block = space[: states.numel()].view(states.shape).copy_(states)
        torch.amin(block, -1, out=low)
        torch.amax(block, -1, out=high)
        torch.sum(block, -1, out=total)
        torch.linalg.vector_norm(block, dim=-1, out=norm)
    return figures.permute(1, 2, 0).contiguous()


def _space_of_thread(num_values: int) -> torch.Tensor:
    """Return memory that a thread keeps: new memory for each sample would cost more than its sums."""
    space: torch.Tensor | None = getattr(_kept, "space", None)
    if space is None or len(space) < num_values:
        with torch.inference_mode(False):  # or it could not be written to outside of that mode
            space = _kept.space = torch.empty(num_values)
    return space
