"""The constants that the attention kernels are compiled for."""

from typing import Any

import torch
import triton

from eyas.kernels.head_layout import Heads

LOG2_E = 1.4426950408889634
# The fastest of several on an H200 (benchmarks/LOG.md).
FORWARD = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
QUERIES = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
KEYS = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
# fp32 tiles take twice the shared memory and are for checking, not for speed: exact products, small tiles.
_EXACT = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}


def constants_of(heads: Heads, tiles: dict[str, int], dtype: torch.dtype) -> dict[str, Any]:
    exact = dtype == torch.float32
    return {
        **(_EXACT if exact else tiles),
        "PRECISION": "ieee" if exact else "tf32",
        "KV_HEADS": heads.kv_heads,
        "GROUP": heads.group,
        "GROUP_P2": triton.next_power_of_2(heads.group),
        "HEAD_DIM": heads.head_dim,
    }
