"""log_decay: how much a state forgets at a token, as a logarithm in fp32.

g = A * softplus(x + bias)                  (transformers: Qwen3Next, KimiLinear; A = -exp(A_log))
g = floor * sigmoid(-A * (x + bias))        with a floor, which is negative
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.kernels.registry import register_reference


def log_decay(x: Tensor, A: Tensor, bias: Tensor, floor: float = 0.0) -> Tensor:
    """Return g in fp32, in the shape of x. Shapes: x [T, H] or [T, H, D]; A [H]; bias [H] or [H, D]."""
    rate = A.float().view(-1, *[1] * (x.ndim - 2))
    wide = x.float() + bias.float()
    if floor:
        return floor * torch.sigmoid(-rate * wide)
    return rate * F.softplus(wide)


register_reference("log_decay", log_decay, inline=True)
