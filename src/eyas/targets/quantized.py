"""Plain values of a weight, however the checkpoint keeps it; used for embedding and head alone.

The engine computes with the quantised weights of all other layers; nothing of them is read here.
Source: the layouts of compressed-tensors 0.17 (pack-quantized, float-quantized) and of DeepSeek-V3's
block-wise FP8.
"""

import math

import torch

from eyas.errors import UserError
from eyas.targets.weights import Weights

_FP8 = ("F8_E4M3", "F8_E5M2")
PLAIN = ("F64", "F32", "F16", "BF16")
# Endings that tell apart what is not read.
_REFUSED = {
    "weight_global_scale": "NVFP4",
    "weight_scale_2": "NVFP4",
    "weight_blocks": "MXFP4",
    "blocks": "MXFP4",
    "qweight": "GPTQ or AWQ",
    "weight_zero_point": "asymmetric compressed-tensors",
    "SCB": "bitsandbytes",
    "absmax": "bitsandbytes",
}


def read_weight(weights: Weights, base: str, dtype: torch.dtype) -> torch.Tensor:
    """Read ``base.weight`` [out, in]; ``dtype`` is what a quantised one becomes.

    Raises: UserError when it is missing, or quantised in a way that is not read.
    """
    ends = {n.removeprefix(f"{base}.") for n in weights.file_of if n.startswith(f"{base}.")}
    for end, kind in _REFUSED.items():
        if end in ends:
            raise _refusal(weights, base, kind)
    if "weight_packed" in ends:
        return _packed(weights, base, "weight_g_idx" in ends, dtype)
    entry = weights.entry(f"{base}.weight")
    if entry.dtype in _FP8:
        for end in ("weight_scale_inv", "weight_scale"):
            if end in ends:
                scale = weights.read(f"{base}.{end}")
                return _scaled(weights.read(f"{base}.weight"), scale, base, dtype)
        raise UserError(f"{base}.weight of {weights.files.where} is FP8 without a weight_scale")
    if entry.dtype not in PLAIN:
        raise _refusal(weights, base, entry.dtype)
    return weights.read(f"{base}.weight")


def _refusal(weights: Weights, base: str, kind: str) -> UserError:
    return UserError(
        f"{base} of {weights.files.where} is quantised as {kind}, which eyas does not read",
        hint="use a checkpoint that leaves embedding and head alone (most do), or the unquantised one",
    )


def _packed(weights: Weights, base: str, is_reordered: bool, dtype: torch.dtype) -> torch.Tensor:
    """Unpack 4- or 8-bit integers in int32 words, least significant first, with a scale a group."""
    rows, columns = weights.read(f"{base}.weight_shape").tolist()
    packed = weights.read(f"{base}.weight_packed")  # (rows, words)
    bits = next((b for b in (4, 8) if packed.shape == (rows, math.ceil(columns / (32 // b)))), None)
    if bits is None or packed.dtype != torch.int32:
        raise _refusal(weights, base, f"{packed.dtype} words of shape {tuple(packed.shape)}")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)  # (rows, words, values a word)
    values = values.flatten(1)[:, :columns].to(torch.int16) - (1 << (bits - 1))
    scale = weights.read(f"{base}.weight_scale").float()
    scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale  # (rows, groups)
    if is_reordered:
        group = weights.read(f"{base}.weight_g_idx").long()
    else:
        group = torch.arange(columns) // math.ceil(columns / scale.shape[1])
    return (values.float() * scale.expand(rows, -1)[:, group]).to(dtype)


def _scaled(weight: torch.Tensor, scale: torch.Tensor, base: str, dtype: torch.dtype) -> torch.Tensor:
    """Apply a scale for the tensor, for each row, or for each block of 128 x 128."""
    rows, columns = weight.shape
    scale = scale.float()
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    elif scale.numel() == rows:
        scale = scale.reshape(rows, 1)
    elif scale.shape == (math.ceil(rows / 128), math.ceil(columns / 128)):
        scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    else:
        raise UserError(f"{base}.weight {tuple(weight.shape)} has scales of shape {tuple(scale.shape)}")
    return (weight.float() * scale).to(dtype)
