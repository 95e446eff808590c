"""Constants of positions other than rotary ones: sinusoidal vectors and ALiBi's slopes.

Source: Vaswani et al. (https://arxiv.org/abs/1706.03762), Press et al. (https://arxiv.org/abs/2108.12409).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sine_rows(dim: int, rows: int, endpoint: bool) -> Tensor:
    """Return position vectors: sines in the first half of the channels, cosines in the second, a zero if one is left.

    Wavelengths grow from 2 pi by a constant factor, over dim / 2 channels: to 10000 times that at the last one with
    ``endpoint``, to one step less without.
    Shapes: float32 [rows, dim].
    """
    half = dim // 2
    if endpoint:
        speeds = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / max(half - 1, 1)))
    else:
        speeds = 1 / torch.pow(10000, torch.arange(0, 2 * half, 2, dtype=torch.float32) / dim)
    angles = torch.arange(rows, dtype=torch.float32)[:, None] * speeds[None, :]
    return torch.nn.functional.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, dim - 2 * half))


def alibi_slopes(heads: int, max_bias: float) -> Tensor:
    """Return how fast each head's scores fall with distance: float32 [heads].

    A number of heads that is no power of two takes the slopes of the power below, then every other one of the power
    above.
    """
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-max_bias / power * (i + 1)) for i in range(power)]
    slopes += [2.0 ** (-max_bias / (2 * power) * (2 * i + 1)) for i in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)
