"""add_norm: a residual add and the norm that follows it.

    s = alpha * a + beta * b        out = (s, norm(s))

The sum is rounded to its dtype before it is normalised, as two separate ops would do.
"""

from __future__ import annotations

from torch import Tensor

from treadle.kernels.add import add
from treadle.kernels.norm import norm
from treadle.kernels.registry import register_reference
from treadle.kernels.skinny import skinny
from treadle.kernels.triton_kernel import register_triton


def add_norm(
    a: Tensor,
    b: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: float = 1.0,
    beta: float = 1.0,
    kind: str = "rms",
    eps: float = 1e-6,
    plus_one: bool = False,
    groups: int = 1,
    cast: str = "after",
) -> tuple[Tensor, Tensor]:
    """Return the sum and its norm, both in the dtype of ``a``.

    Shapes: a, b [..., C]; weight and bias as in ``norm``.
    """
    total = add(a, b, alpha, beta)
    return total, norm(total, weight, bias, kind, eps, plus_one, groups, cast)


register_reference("add_norm", add_norm, inline=True)
register_triton("add_norm", "norm_triton", skinny("a", "b", "weight", "bias"))
