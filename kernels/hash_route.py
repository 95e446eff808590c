"""hash_route: experts that a table gives for each token id, weighed by what the router scores them (DeepSeek V4)."""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.registry import register_reference
from treadle.kernels.route import score_logits


def hash_route(
    logits: Tensor, token_ids: Tensor, table: Tensor, score: str = "softmax", normalize: bool = False,
    norm_eps: float = 0.0, norm_min: float = 0.0, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return weights [T, k] float32 and ids [T, k] int32. Shapes: logits [T, E]; token_ids [T]; table [V, k]."""
    ids = table[token_ids].long()
    weights = score_logits(logits.float(), score).gather(-1, ids)
    if normalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total.clamp(min=norm_min) if norm_min else total + norm_eps)
    return weights * scale, ids.to(torch.int32)


register_reference("hash_route", hash_route, inline=True)
