"""experts: the feed-forwards of a mixture, each over the rows that chose it.

    y[t] = sum_j weights[t, j] * (down[e] h + down_bias[e]),  e = ids[t, j],  g, u = up[e] x[t] + up_bias[e]

    gated    h = act(min(g, limit)) * clip(u, -limit, limit)               limit 0: no clipping
             swiglu_oai: g * sigmoid(alpha * g) * (u + 1), clipped as above
             situ: beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)
    else     h = act(u)

The products are rounded to the dtype of x, as a linear layer's are; the sum over a token's experts is in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.kernels.activation import activation
from treadle.kernels.experts_native import run_experts, supports
from treadle.kernels.registry import Kernel, define_opaque, dtypes_of, if_deterministic, register, register_reference
from treadle.kernels.skinny import DTYPES
from treadle.kernels.triton_kernel import register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target


def expert_activation(
    x: Tensor,
    act: str = "silu",
    gated: bool = True,
    limit: float = 0.0,
    alpha: float = 1.702,
    beta: float = 0.0,
    linear_beta: float = 0.0,
) -> Tensor:
    """Return the hidden channels. Shapes: x [..., 2 F] (gated) or [..., F]; result [..., F].

    Raises: UnknownActivationError.
    """
    if not gated:
        return activation(x, act)
    gate, up = x.chunk(2, -1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if act == "swiglu_oai":
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))
    if act == "situ":
        gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
        return gate * (linear_beta * torch.tanh(up / linear_beta))
    return activation(gate, act) * up


def experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    act: str = "silu",
    gated: bool = True,
    limit: float = 0.0,
    alpha: float = 1.702,
    beta: float = 0.0,
    linear_beta: float = 0.0,
    weigh_input: bool = False,
) -> Tensor:
    """Return the weighted sum of every row's experts, in the dtype of ``x``.

    Shapes: x [T, C]; weights, ids [T, k]; up [E, 2 F, C] (gated) or [E, F, C]; down [E, C, F]; result [T, C].
    """
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(down.shape[0]):
        rows, column = torch.where(ids == expert)
        if not len(rows):
            continue
        weight = weights[rows, column, None]
        inputs = x[rows] * weight.to(x.dtype) if weigh_input else x[rows]
        hidden = F.linear(inputs, up[expert], None if up_bias is None else up_bias[expert])
        hidden = expert_activation(hidden, act, gated, limit, alpha, beta, linear_beta)
        outputs = F.linear(hidden, down[expert], None if down_bias is None else down_bias[expert]).float()
        result.index_add_(0, rows, outputs if weigh_input else outputs * weight)
    return result.to(x.dtype)


def experts_cpp(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    act: str = "silu",
    gated: bool = True,
    limit: float = 0.0,
    alpha: float = 1.702,
    beta: float = 0.0,
    linear_beta: float = 0.0,
    weigh_input: bool = False,
    *,
    invariant: bool = False,
) -> Tensor:
    """Return ``experts``'s result on a CPU, reading only the experts that are visited. Shapes: as ``experts``.

    ``invariant``: in one way for any number of rows.
    """
    options = (act, gated, limit, alpha, beta, linear_beta)
    return run_experts(
        x, weights, ids, up, None, up_bias, down, None, down_bias, 0, expert_activation, options, weigh_input,
        invariant=invariant,
    )  # fmt: skip


def _invariant(*args: Any) -> Tensor:
    return experts_cpp(*args, invariant=True)


def _of_one_dtype(target: Target, attrs: Mapping[str, Any]) -> bool:
    dtypes = dtypes_of(target, attrs, "x", "up", "up_bias", "down", "down_bias")
    return len(dtypes) == 1 and dtypes <= DTYPES


# Its shapes depend on the ids: it cannot be traced.
register_reference("experts", experts, inline=False)
register(
    Kernel(
        op="experts",
        name="experts.cpp",
        function=define_opaque("experts", "cpp", experts_cpp, "cpu"),
        inline=False,
        supports=supports,
        priority=10,
    )
)
register(
    Kernel(
        op="experts",
        name="experts.cpp_invariant",
        function=define_opaque("experts", "cpp_invariant", _invariant, "cpu"),
        inline=False,
        supports=if_deterministic(supports),
        priority=11,
        invariant=True,
    )
)
register_triton("experts", "experts_launch", _of_one_dtype, invariant=True)
