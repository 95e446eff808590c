"""linear_int8: a linear layer whose weight is int8 with one fp32 scale per (row, group of the K channels).

    y = x (weight * scale)^T + b

Weight-only and symmetric: the activations are not quantised, and accumulation is in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.kernels.registry import register_reference


def quantize_int8(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return (int8 weight [N, K], fp32 scale [N, K / group]): symmetric, absmax / 127, rounded to nearest.

    A group of zeros gets scale 0. Raises: ValueError if ``group`` does not divide K.
    """
    rows, width = weight.shape
    if group <= 0 or width % group:
        raise ValueError(f"quantize_int8: group {group} does not divide {width} input channels; {width} always works")
    blocks = weight.float().view(rows, width // group, group)
    scale = blocks.abs().amax(-1) / 127.0
    inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
    codes = (blocks * inverse.unsqueeze(-1)).round_().clamp_(-127, 127)
    return codes.to(torch.int8).view(rows, width), scale


def dequantize_int8(weight: Tensor, scale: Tensor, group: int) -> Tensor:
    """Return ``weight * scale`` in fp32. Shapes: weight [N, K]; scale [N, K / group]; result [N, K]."""
    blocks = weight.float().unflatten(-1, (scale.shape[-1], group))
    return (blocks * scale.unsqueeze(-1)).flatten(-2)


def linear_int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, group: int) -> Tensor:
    """Return the product, in the dtype of ``x``.

    Shapes: x [..., K]; weight [N, K] int8; scale [N, K / group] fp32; bias [N]; result [..., N].
    """
    y = F.linear(x.float(), dequantize_int8(weight, scale, group), None if bias is None else bias.float())
    return y.to(x.dtype)


register_reference("linear_int8", linear_int8, inline=True)
