"""add: a weighted sum, the residual connection.

    out = alpha * a + beta * b

In a low precision every product is rounded before the sum (transformers: Granite's residual multiplier).
"""

from __future__ import annotations

from torch import Tensor

from treadle.kernels.registry import register_reference


def add(a: Tensor, b: Tensor, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """Return ``alpha * a + beta * b``; all of one shape and dtype."""
    left = a if alpha == 1.0 else a * alpha
    right = b if beta == 1.0 else b * beta
    return left + right


register_reference("add", add, inline=True)
