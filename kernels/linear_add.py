"""linear_add: a linear layer and the residual add that reads its result.

    out = alpha * residual + beta * (x W^T + b)

The product is rounded to its dtype before it is added, as two separate ops would do.
"""

from __future__ import annotations

from torch import Tensor

from treadle.kernels.add import add
from treadle.kernels.linear import linear
from treadle.kernels.registry import register_reference
from treadle.kernels.skinny import skinny
from treadle.kernels.triton_kernel import register_triton


def linear_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """Return the weighted sum, in the dtype of ``x``. Shapes: x [..., K]; weight [N, K]; bias [N]; others [..., N]."""
    return add(residual, linear(x, weight, bias), alpha, beta)


register_reference("linear_add", linear_add, inline=True, invariant=False)
register_triton("linear_add", "linear_triton", skinny("x", "weight", "bias", "residual"))
