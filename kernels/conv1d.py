"""conv1d: a short causal convolution of every channel apart, over the tokens of each sequence.

    out[t, c] = act(bias[c] + sum_j weight[c, j] * x[t - K + 1 + j, c])

In fp32, rounded once. The state holds the last K - 1 inputs of a sequence, [C, K - 1] in the dtype of x, oldest first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.kernels.activation import activation
from treadle.kernels.blocks import Part
from treadle.kernels.registry import register_reference


def convolve(x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> tuple[Tensor, Tensor]:
    """Return what one sequence's inputs give, and the state that they leave.

    Shapes: x [T, C]; before [C, K - 1] in x's dtype; weight [C, K]; bias [C]; results [T, C] fp32 and [C, K - 1].
    """
    channels, width = weight.shape
    inputs = torch.cat([before, x.t()], 1)
    wide = None if bias is None else bias.float()
    y = F.conv1d(inputs.float(), weight.float().view(channels, 1, width), wide, groups=channels)
    return activation(y.t(), act), inputs[:, inputs.shape[1] - width + 1 :]


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
        (before,) = part.read([item], (channels, width - 1), x.dtype)
        y, after = convolve(x[item.rows], before, weight, bias, act)
        out[item.rows] = y.to(x.dtype)
        part.write([item], after.unsqueeze(0))
    return out


register_reference("conv1d", conv1d, inline=False)
