"""add_positions: position vectors on top of embeddings.

    out[t] = x[t] + table[positions[t] + offset]

A negative position belongs to no token: it reads row ``offset``.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from treadle.kernels.registry import register_reference


def add_positions(x: Tensor, positions: Tensor, table: Tensor, offset: int = 0) -> Tensor:
    """Return ``x`` plus the rows of its positions.

    Shapes: x [T, C]; positions [T] int64; table [L + offset, C], L above every position; result [T, C].
    """
    return x + F.embedding(positions.clamp(min=0) + offset, table)


register_reference("add_positions", add_positions, inline=True)
