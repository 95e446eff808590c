"""differential: what two attentions leave when one is subtracted (Ye et al., https://arxiv.org/abs/2410.05258).

lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + init
out[t, h] = (1 - init) * rms(x[t, h] - lambda * x[t, h + H/2])
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.norm import norm
from treadle.kernels.registry import register_reference


def differential(x: Tensor, lq1: Tensor, lk1: Tensor, lq2: Tensor, lk2: Tensor, init: float, eps: float) -> Tensor:
    """Return the difference of the two halves of the heads, normalised.

    Shapes: x [T, H, D]; lq1 .. lk2 [any]; result [T, H / 2, D].
    """
    first, second = ((a * b).sum(dtype=torch.float32).exp().to(x.dtype) for a, b in ((lq1, lk1), (lq2, lk2)))
    left, right = x.chunk(2, 1)
    return (1 - init) * norm(left - (first - second + init) * right, None, None, "rms", eps)


register_reference("differential", differential, inline=True)
