"""linear: y = x W^T + b, accumulated in fp32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from treadle.kernels.registry import register_reference


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product, in the dtype of ``x``. Shapes: x [..., K]; weight [N, K]; bias [N]; result [..., N]."""
    return F.linear(x, weight, bias)


register_reference("linear", linear, inline=True)
