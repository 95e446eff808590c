"""MXFP4: 4-bit floats in blocks of 32 along the input, each block with a power of two (OCP Microscaling Formats 1.0).

A byte holds two values, the lower four bits first: a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6. A scale byte s stands
for 2 ** (s - 127). Checkpoints keep a weight [..., N, K] as

    NAME_blocks [..., N, K / 32, 16]  and  NAME_scales [..., N, K / 32]     (gpt-oss)
    NAME_packed [..., N, K / 2]       and  NAME_scale  [..., N, K / 32]     (compressed-tensors)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32
"""Values that share a scale."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_SCALES = {"_blocks": "_scales", "_packed": "_scale"}


def scales_name(tensor: str) -> str | None:
    """Return the name of the tensor that holds the scales of ``tensor``, None if it holds no values."""
    for values, scales in _SCALES.items():
        if tensor.endswith(values):
            return tensor.removesuffix(values) + scales
    return None


def unpacked_shape(tensor: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the weight whose values ``tensor`` of ``shape`` holds. Raises: ValueError."""
    if tensor.endswith("_blocks"):
        if len(shape) < 3 or shape[-1] != BLOCK // 2:
            raise ValueError(f"is no tensor of blocks of {BLOCK // 2} bytes")
        return (*shape[:-2], shape[-2] * BLOCK)
    if shape[-1] * 2 % BLOCK:
        raise ValueError(f"has rows that are no whole blocks of {BLOCK} values")
    return (*shape[:-1], shape[-1] * 2)


def dequantize_mxfp4(values: Tensor, scales: Tensor) -> Tensor:
    """Return the weight in float32, exactly.

    Shapes: ``scales`` [..., N, K / 32] uint8; ``values`` as many bytes as half the values; result [..., N, K].
    """
    import torch

    table = torch.tensor(VALUES, dtype=torch.float32, device=values.device)
    codes = values.reshape(*scales.shape, BLOCK // 2)
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    weight = table[pairs.int()] * torch.exp2(scales.float() - 127).unsqueeze(-1)
    return weight.flatten(-2)
