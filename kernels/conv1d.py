"""conv1d: a short causal convolution of every channel apart, over the tokens of each sequence.

    out[t, c] = act(bias[c] + sum_j weight[c, j] * x[t - K + 1 + j, c])

In fp32, rounded once. The state holds the last K - 1 inputs of a sequence, [K - 1, C] in the dtype of x, oldest first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.kernels import native
from treadle.kernels.activation import activation
from treadle.kernels.blocks import Part
from treadle.kernels.conv1d_native import ACTIVATIONS, conv1d_cpp
from treadle.kernels.registry import Kernel, define_opaque, dtypes_of, register, register_reference
from treadle.kernels.triton_kernel import register_triton

if TYPE_CHECKING:
    from treadle.graph.target import Target


def convolve(x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> tuple[Tensor, Tensor]:
    """Return what one sequence's inputs give, and the state that they leave.

    Shapes: x [T, C]; before [K - 1, C] in x's dtype; weight [C, K]; bias [C]; results [T, C] fp32 and [K - 1, C].
    """
    channels, width = weight.shape
    inputs = torch.cat([before, x])
    wide = None if bias is None else bias.float()
    y = F.conv1d(inputs.t().float(), weight.float().view(channels, 1, width), wide, groups=channels)
    return activation(y.t(), act), inputs[inputs.shape[0] - width + 1 :]


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    memory: Tensor,
    blocks: Tensor,
    offset: Tensor,
    q_starts: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
    act: str = "none",
) -> Tensor:
    """Return the convolution of every live sequence, zeros elsewhere, and move their states on.

    Shapes: x [T, C]; weight [C, K]; bias [C]; result [T, C]; the rest as ``graph.recurrent_ops`` says.
    Raises: UnknownActivationError.
    """
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    part = Part(memory, blocks, offset, q_starts, positions, kv_lens)
    channels, width = weight.shape
    for item in part.live():
        (before,) = part.read([item], (width - 1, channels), x.dtype)
        y, after = convolve(x[item.rows], before, weight, bias, act)
        out[item.rows] = y.to(x.dtype)
        part.write([item], after.unsqueeze(0))
    return out


def _of_known_types(target: Target, attrs: Mapping[str, Any]) -> bool:
    inputs = dtypes_of(target, attrs, "x", "weight", "bias")
    return len(inputs) == 1 and inputs <= native.DTYPES.keys() and attrs.get("act", "none") in ACTIVATIONS


def _supports(target: Target, attrs: Mapping[str, Any]) -> bool:
    return target.device == "cpu" and _of_known_types(target, attrs) and native.usable("conv1d")


register_reference("conv1d", conv1d, inline=False)
register(
    Kernel(
        op="conv1d",
        name="conv1d.cpp",
        function=define_opaque("conv1d", "cpp", conv1d_cpp, "cpu"),
        inline=False,
        supports=_supports,
        priority=10,
        invariant=True,
    )
)
register_triton("conv1d", "conv1d_triton", _of_known_types, invariant=True)
