"""norm: RMS, layer and L2 normalisation over the last dim, in fp32.

    rms    y = x / sqrt(mean(x^2) + eps)
    layer  y = (x - mean(x)) / sqrt(var(x) + eps)
    l2     y = x / sqrt(sum(x^2) + eps)
    out = y * (weight + plus_one) + bias

With ``groups`` > 1 the statistics are those of each of ``groups`` equal slices. Rounding of an RMS or L2 norm in a low
precision: cast "after" rounds y and multiplies in the low precision (transformers: LlamaRMSNorm), cast "before"
multiplies in fp32 and rounds once (Gemma3RMSNorm). A layer norm always rounds once, as nn.LayerNorm does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.registry import register_reference
from treadle.kernels.skinny import skinny
from treadle.kernels.triton_kernel import register_triton


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str = "rms",
    eps: float = 1e-6,
    plus_one: bool = False,
    groups: int = 1,
    cast: str = "after",
) -> Tensor:
    """Return the normalised ``x``, in its dtype.

    Shapes: x [..., C]; weight and bias [C], or anything that broadcasts over x.
    Raises: ValueError for an unknown ``kind`` or ``cast``.
    """
    if cast not in ("after", "before"):
        raise ValueError(f"norm: cast={cast!r} is neither 'after' nor 'before'")
    y = x.float()
    if groups > 1:
        y = y.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    if kind == "rms":
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    elif kind == "layer":
        y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    elif kind == "l2":
        y = y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + eps)
    else:
        raise ValueError(f"norm: kind={kind!r} is not one of 'rms', 'layer', 'l2'")
    if groups > 1:
        y = y.view(x.shape)
    if cast == "after" and kind != "layer":
        y = y.to(x.dtype)
    else:
        weight = None if weight is None else weight.float()
        bias = None if bias is None else bias.float()
    if weight is not None:
        y = y * (weight + 1 if plus_one else weight)
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


register_reference("norm", norm, inline=True)
register_triton("norm", "norm_triton", skinny("x", "weight", "bias"))
