"""norm_gated_linear: the first half of a gated MLP, from the residual stream to the input of its down projection.

    h = norm(x) W^T + b         out = act(h[..., :n]) * h[..., n:], n = half of the last dim

Every step is rounded to the dtype of ``x``, as three separate ops would do.
"""

from __future__ import annotations

from torch import Tensor

from treadle.kernels.activation import gated_activation
from treadle.kernels.linear import linear
from treadle.kernels.norm import norm
from treadle.kernels.registry import register_reference
from treadle.kernels.skinny import skinny
from treadle.kernels.triton_kernel import register_triton


def norm_gated_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    kind: str,
    eps: float,
    plus_one: bool,
    groups: int,
    cast: str,
    weight: Tensor,
    bias: Tensor | None,
    act: str,
) -> Tensor:
    """Return the gated product, in the dtype of ``x``.

    Shapes: x [..., K]; norm's weight and bias as in ``norm``; weight [2 n, K]; bias [2 n]; result [..., n].
    """
    h = norm(x, norm_weight, norm_bias, kind, eps, plus_one, groups, cast)
    return gated_activation(linear(h, weight, bias), act)


register_reference("norm_gated_linear", norm_gated_linear, inline=True, invariant=False)
register_triton("norm_gated_linear", "linear_triton", skinny("x", "norm_weight", "norm_bias", "weight", "bias"))
