"""experts_int8: a mixture of experts whose matrices are int8 with one fp32 scale per (row, group of input channels).

The math is that of ``experts`` over weight * scale; activations are not quantised. See ``linear_int8``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from treadle.kernels.experts import expert_activation
from treadle.kernels.experts_native import by_expert, run_experts, supports
from treadle.kernels.linear_int8 import dequantize_int8
from treadle.kernels.registry import Kernel, define_opaque, if_deterministic, register, register_reference


def experts_int8(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    up: Tensor,
    up_scale: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_bias: Tensor | None,
    group: int,
    act: str = "silu",
    gated: bool = True,
    limit: float = 0.0,
    alpha: float = 1.702,
    beta: float = 0.0,
    linear_beta: float = 0.0,
    weigh_input: bool = False,
) -> Tensor:
    """Return the weighted sum of every row's experts, in the dtype of ``x``.

    Shapes: as ``experts``, with ``up_scale`` [E, 2 F or F, C / group] and ``down_scale`` [E, C, F / group].
    """
    made = by_expert(
        x.float(),
        weights,
        ids,
        down.shape[0],
        lambda expert: dequantize_int8(up[expert], up_scale[expert], group),
        None if up_bias is None else up_bias.float(),
        lambda expert: dequantize_int8(down[expert], down_scale[expert], group),
        None if down_bias is None else down_bias.float(),
        expert_activation,
        (act, gated, limit, alpha, beta, linear_beta),
        weigh_input,
    )
    return made.to(x.dtype)


def experts_int8_cpp(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    up: Tensor,
    up_scale: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_bias: Tensor | None,
    group: int,
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
    """Return ``experts_int8``'s result on a CPU, reading only the experts that are visited.

    ``invariant``: in one way for any number of rows.
    """
    options = (act, gated, limit, alpha, beta, linear_beta)
    return run_experts(
        x, weights, ids, up, up_scale, up_bias, down, down_scale, down_bias, group, expert_activation, options,
        weigh_input, invariant=invariant,
    )  # fmt: skip


def _invariant(*args: Any) -> Tensor:
    return experts_int8_cpp(*args, invariant=True)


register_reference("experts_int8", experts_int8, inline=False)
register(
    Kernel(
        op="experts_int8",
        name="experts_int8.cpp",
        function=define_opaque("experts_int8", "cpp", experts_int8_cpp, "cpu"),
        inline=False,
        supports=supports,
        priority=10,
    )
)
register(
    Kernel(
        op="experts_int8",
        name="experts_int8.cpp_invariant",
        function=define_opaque("experts_int8", "cpp_invariant", _invariant, "cpu"),
        inline=False,
        supports=if_deterministic(supports),
        priority=11,
        invariant=True,
    )
)
