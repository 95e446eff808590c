"""gated_norm: a norm with an output gate, as linear attention and state-space mixers end.

    norm(x) * act(gate)          the gate behind the norm (transformers: Qwen3Next, KimiLinear)
    norm(x * act(gate))          gate_first (transformers: Mamba2, Bamba)

The gate, its function and the product with it are in fp32; what is rounded inside the norm is as ``norm`` says.
"""

from __future__ import annotations

from torch import Tensor

from treadle.kernels.activation import activation
from treadle.kernels.norm import norm
from treadle.kernels.registry import register_reference


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str = "rms",
    eps: float = 1e-6,
    plus_one: bool = False,
    groups: int = 1,
    cast: str = "after",
    act: str = "silu",
    gate_first: bool = False,
) -> Tensor:
    """Return the gated and normalised ``x``, in its dtype.

    Shapes: x and gate [..., C]; weight and bias [C]. Raises: ValueError for an unknown ``kind`` or ``cast``,
    UnknownActivationError.
    """
    factor = activation(gate.float(), act)
    if gate_first:
        product = x.float() * factor
        if cast == "before" or kind == "layer":
            weight, bias = (None if t is None else t.float() for t in (weight, bias))
            return norm(product, weight, bias, kind, eps, plus_one, groups, "before").to(x.dtype)
        y = norm(product, None, None, kind, eps, False, groups, "before").to(x.dtype)
        if weight is not None:
            y = y * (weight + 1 if plus_one else weight)
        return (y if bias is None else y + bias).to(x.dtype)
    if cast == "before" or kind == "layer":
        y = norm(x.float(), weight, bias, kind, eps, plus_one, groups, "before")
    else:
        y = norm(x, weight, bias, kind, eps, plus_one, groups, cast).float()
    return (y * factor).to(x.dtype)


register_reference("gated_norm", gated_norm, inline=True)
