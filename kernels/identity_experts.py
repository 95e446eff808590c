"""identity_experts: x times the sum of the weights of the experts that return their input (ids ``first`` and above)."""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.registry import register_reference


def identity_experts(x: Tensor, weights: Tensor, ids: Tensor, first: int) -> Tensor:
    """Return the product, in the dtype of ``x``. Shapes: x [T, C]; weights, ids [T, k]; result [T, C]."""
    share = torch.where(ids >= first, weights, 0.0).sum(-1, keepdim=True)
    return (x.float() * share).to(x.dtype)


register_reference("identity_experts", identity_experts, inline=True)
