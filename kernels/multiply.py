"""multiply: x times a learned weight that broadcasts over it, such as the one scale of a layer."""

from __future__ import annotations

from torch import Tensor

from treadle.kernels.registry import register_reference


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product in the dtype of ``x``. Shapes: x [..., C]; weight [1] or [C]."""
    return x * weight.to(x.dtype)


register_reference("multiply", multiply, inline=True)
