"""res_mix: what a sublayer reads where residual streams were set aside as snapshots (Kimi: attention residuals).

    entries = bank ++ x;  p = softmax_e((norm * project) . entries[e] / rms(entries[e]));  out = sum_e p[e] entries[e]

In float32, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.registry import register_reference


def res_mix(bank: Tensor, x: Tensor, norm: Tensor, project: Tensor, eps: float) -> Tensor:
    """Return the mixture. Shapes: bank [T, S, C]; x [T, C]; norm [C]; project [1, C]; result [T, C]."""
    entries = torch.cat([bank, x.unsqueeze(1)], 1).float()
    scaled = entries * torch.rsqrt(entries.pow(2).mean(-1, keepdim=True) + eps)
    shares = (scaled * (norm.float() * project.float().flatten())).sum(-1).softmax(-1)
    return (shares.unsqueeze(-1) * entries).sum(1).to(x.dtype)


register_reference("res_mix", res_mix, inline=True)
