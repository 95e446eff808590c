"""time_step: the step sizes of a state space, softplus(x + bias) within limits, in fp32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from treadle.kernels.registry import register_reference


def time_step(x: Tensor, bias: Tensor | None, low: float = 0.0, high: float = 3.4e38) -> Tensor:
    """Return the step sizes in fp32. Shapes: x [T, C]; bias [C]."""
    wide = x.float()
    return F.softplus(wide if bias is None else wide + bias.float()).clamp(low, high)


register_reference("time_step", time_step, inline=True)
